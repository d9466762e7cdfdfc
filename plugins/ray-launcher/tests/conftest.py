"""One small Ray cluster for all tests of a session, with pretended GPUs; launchers use the connection that they find."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from ray_support import GPUS

ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1"}


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """Its address."""
    if os.environ.get("MILES_LEG") == "ray":
        import ray
    else:
        ray = pytest.importorskip("ray")
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
