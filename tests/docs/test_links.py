"""Links of the README, the docs and the plugins' READMEs lead somewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from pages import ROOT, anchors, links

PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("plugins/*/README.md"), *ROOT.glob("docker/*.md")]
)


def problem_of(page: Path, target: str) -> str | None:
    """Why `target` on `page` leads nowhere, or None. Links to the web are not followed."""
    if "://" in target or target.startswith("mailto:"):
        return None
    path, _, fragment = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    if not file.is_relative_to(ROOT):
        return "is outside the repository"
    if not file.exists():
        return "does not exist"
    if fragment and file.suffix == ".md" and fragment not in anchors(file.read_text("utf-8")):
        return f'has no heading "#{fragment}"'
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path):
    found = {target: problem_of(page, target) for target in links(page.read_text("utf-8"))}
    assert {target: problem for target, problem in found.items() if problem} == {}


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("docs/gone.md", "does not exist"),
        ("docs/architecture.md#no-such-part", 'has no heading "#no-such-part"'),
        ("docs/architecture.md#4-hooks", None),
        ("../elsewhere.md", "is outside the repository"),
    ],
)
def test_a_link_that_leads_nowhere_is_found(target: str, problem: str | None):
    assert problem_of(ROOT / "README.md", target) == problem


def test_links_in_code_do_not_count():
    assert links("[a](b.md) `[c](d.md)`\n```text\n[e](f.md)\n```\n") == ["b.md"]
