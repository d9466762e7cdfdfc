"""One small Ray cluster for all tests of a session, with pretended GPUs; launchers use the connection that they find."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from ray_support import GPUS

ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1"}


@pytest.fixture(scope="session")
def ray_here() -> None:
    """Skips where Ray is not installed and in other legs of CI; in its own leg, its lack is a failure."""
    leg = os.environ.get("MILES_LEG", "")
    if leg not in ("", "ray"):
        pytest.skip("runs in the leg ray")
    if find_spec("ray") is None:
        pytest.fail("Ray is not installed") if leg else pytest.skip("Ray is not installed")


@pytest.fixture(scope="session")
def cluster(ray_here: None) -> Iterator[str]:
    """Its address."""
    import ray

    os.environ.update(ENVIRONMENT)
    warnings.filterwarnings("ignore", category=FutureWarning, module="ray")
    context = ray.init(
        address="local",
        num_cpus=2,
        num_gpus=GPUS,
        include_dashboard=False,
        object_store_memory=80 << 20,
        log_to_driver=False,
        configure_logging=False,
    )
    yield context.address_info["gcs_address"]
    ray.shutdown()
