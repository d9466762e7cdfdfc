"""The numpy toy stack is built in, so that `use = "toy"` works with the core alone."""

from __future__ import annotations

from miles_core.testing.toy import COMPONENTS as COMPONENTS
