"""Runs the tests that carry a field case's id and prints case -> test -> result.

    python scripts/field_cases.py            run them
    python scripts/field_cases.py --list     only say which tests there are

A field case is something that went wrong for users of comparable systems; each test pins the right behaviour. Exits
with 1 when a case has no test, or a test of a case failed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CASES = {
    "D1": "JSONL with BOM, blank lines, CRLF, U+2028, no last newline",
    "D3": "missing or null label or prompt",
    "D5": "prompt longer than the context",
    "D6": "data set smaller than the batch",
    "T1": "decode and encode drift",
    "T3": "template rewrites history; one trajectory, one vote",
    "T4": "padding counted as response",
    "T6": "tool tokens in the loss",
    "T7": "mask off by one",
    "T9": "chat template missing, or different in the engine",
    "R1": "wrong number of rewards",
    "R2": "None, NaN or inf among rewards",
    "R4": "a reward that raises",
    "R5": "a reward that hangs",
    "R6": "a verifier that works in the main thread only",
    "R7": "math equivalence table",
    "R8": "the wrong place of an answer is read",
    "F1": "equal rewards give exactly zero",
    "F4": "loss depends on microbatching",
    "F5": "truncated samples in the denominator",
    "F6": "nothing to train on",
    "F7": "importance ratio overflow",
    "F9": "a filter that never fills the batch",
    "F10": "GAE across masked tokens",
    "F11": "temperature missing from the trainer's log-probabilities",
    "E1": "empty response",
    "E3": "siblings with one seed",
    "C1": "killed while saving",
    "C2": "resume at an epoch boundary",
    "C3": "samples lost or repeated on resume",
    "C5": "optimizer silently fresh",
    "G1": "one broken plugin",
    "G2": "two plugins with one name",
    "G4": "one hook that raises",
    "G6": "unknown option accepted",
    "W1": "prefix cache survives a weight update",
    "W3": "tied embeddings",
    "W5": "a sync that hangs",
    "A1": "staleness bound after recovery",
    "A3": "one sample from several policies",
    "P1": "bf16 log-probabilities",
    "X1": "a worker dies",
    "X3": "a placement that cannot be met",
    "O1": "a tracker that fails",
    "O2": "prompts that flood logs",
}
NAME = re.compile(r"^test_([A-Z]\d+)_")


def main() -> int:
    listing = "--list" in sys.argv[1:]
    pattern = " or ".join(f"test_{case}_" for case in CASES)
    results: dict[str, dict[str, str]] = defaultdict(dict)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-k", pattern, f"--junitxml={report}"]
        subprocess.run(command + (["--collect-only"] if listing else []), cwd=ROOT, stdout=sys.stderr, check=False)
        if listing:
            done = subprocess.run([*command[:-1], "--collect-only"], cwd=ROOT, capture_output=True, text=True, check=False)
            for line in done.stdout.splitlines():
                if "::" in line:
                    _add(results, line.split("::")[0], line.split("::")[-1], "-")
        else:
            for case in ElementTree.parse(report).getroot().iter("testcase"):
                outcome = next((c.tag for c in case if c.tag in ("failure", "error", "skipped")), "passed")
                _add(results, case.get("classname", ""), case.get("name", ""), outcome)
    bad = 0
    for case, title in CASES.items():
        print(f"{case:<4} {title}")
        for test, outcome in sorted(results[case].items()):
            print(f"     {outcome:<8} {test}")
            bad += outcome in ("failure", "error")
        if not results[case]:
            print("     no test")
            bad += 1
    print(f"{len(CASES)} cases, {sum(len(r) for r in results.values())} tests, {bad} problems")
    return 1 if bad else 0


def _add(results: dict[str, dict[str, str]], place: str, name: str, outcome: str) -> None:
    """Books a test under its case; parametrised variants count as one, the worst outcome wins."""
    name = name.split("[")[0]
    if match := NAME.match(name):
        key = f"{place}::{name}"
        worse = {"passed": 0, "-": 0, "skipped": 1, "failure": 2, "error": 2}
        before = results[match.group(1)].get(key, "passed" if outcome != "-" else "-")
        results[match.group(1)][key] = max(before, outcome, key=lambda o: worse.get(o, 0))


if __name__ == "__main__":
    sys.exit(main())
