"""The launcher `local`: worker processes on this machine."""

from __future__ import annotations

from pydantic import Field

from miles_core.component import BuildContext, Component, ComponentConfig
from miles_core.interfaces import Launcher


class LocalLauncherConfig(ComponentConfig):
    """Processes on this machine."""

    startup_timeout_s: float = Field(default=300.0, gt=0)
    """How long a worker may take to start and import its libraries, before it loads a model."""
    grace_s: float = Field(default=10.0, ge=0)
    """How long a worker may take to end after SIGTERM, before it is killed."""


def _build(config: LocalLauncherConfig, context: BuildContext) -> Launcher:
    from miles_core.launch import LocalLauncher

    return LocalLauncher(run_dir=context.run_dir, startup_timeout_s=config.startup_timeout_s, grace_s=config.grace_s)


COMPONENTS = {
    "miles_launchers": [
        Component(name="local", summary="worker processes on this machine", config=LocalLauncherConfig, build=_build)
    ]
}
