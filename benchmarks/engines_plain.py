"""SGLang's own benchmark client (`sglang.bench_serving`) on prompts of ours: its code, with only the data set replaced.

    python benchmarks/engines_plain.py PROMPTS.json RESULT.jsonl [options of sglang.bench_serving ...]

PROMPTS.json holds {"prompts": [[ids], ...], "new_tokens": N}. Runs in the environment of SGLang.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

try:
    from sglang.benchmark import serving
except ImportError:  # before 0.5.16
    from sglang import bench_serving as serving  # type: ignore[no-redef]


class NoTokenizer:
    """Token ids go in and are counted by the server; the client encodes the text of answers only to count it again."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return []


def main(prompts: str, result: str, *options: str) -> None:
    data = json.loads(Path(prompts).read_text("utf-8"))
    rows = [serving.DatasetRow(prompt=ids, prompt_len=len(ids), output_len=data["new_tokens"]) for ids in data["prompts"]]
    serving.get_dataset = lambda *args, **kwargs: rows
    serving.get_tokenizer = lambda *args, **kwargs: NoTokenizer()
    fixed = ["--backend", "sglang", "--dataset-name", "random-ids", "--num-prompts", str(len(rows)), "--disable-tqdm"]
    fixed += ["--model", "miles", "--tokenizer", "miles", "--output-file", result, "--flush-cache", *options]
    sys.argv = ["bench_serving", *fixed]
    serving.cli_main()


if __name__ == "__main__":
    main(*sys.argv[1:])
