"""Writes the last part of docs/testing-plugins.md: every rule of every contract suite, in the words of its docstring.

python scripts/contract_rules.py           # write it
python scripts/contract_rules.py --check   # exit 1 when it is stale
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "testing-plugins.md"
MARK = "*Written by `scripts/contract_rules.py` from the docstrings of the rules.*\n"
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from miles_core.testing import CONTRACTS  # noqa: E402
from miles_core.testing.contracts import rules  # noqa: E402


def page(text: str) -> str:
    """`text` of the page with its last part written anew."""
    head, mark, _ = text.partition(MARK)
    assert mark, f"{PAGE} does not hold the line: {MARK}"
    return head + mark + "".join(map(section, CONTRACTS))


def section(name: str) -> str:
    about = "What holds for every component; all other suites but that of fields include it." if name == first() else ""
    lines = [f"\n### {name}\n", *([about + "\n"] if about else []), "| Rule | It holds when |", "|---|---|"]
    for rule, text in rules(name).items():
        lines.append(f"| `{rule.removeprefix('test_')}` | {text.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def first() -> str:
    return next(iter(CONTRACTS))


def main() -> int:
    old = PAGE.read_text("utf-8")
    new = page(old)
    if "--check" in sys.argv[1:]:
        if old != new:
            print(f"{PAGE} is stale: python scripts/contract_rules.py", file=sys.stderr)
        return int(old != new)
    PAGE.write_text(new, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
