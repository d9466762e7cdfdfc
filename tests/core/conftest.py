"""Fixtures for the tests of the core."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from dists import Dists


@pytest.fixture
def dists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Dists]:
    """Throw-away distributions; the import path and the imported modules are put back afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    made = Dists(tmp_path)
    yield made
    made.forget()
