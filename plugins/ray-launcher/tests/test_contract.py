"""The contract suite of launchers on Ray actors."""

from __future__ import annotations

import pytest

import miles_ray_launcher
from miles_core.testing.contracts import LauncherContract

(RAY,) = miles_ray_launcher.miles_launchers()


@pytest.mark.usefixtures("cluster")
class TestRayLauncher(LauncherContract):
    component = RAY
    options = {"grace_s": 2.0}
