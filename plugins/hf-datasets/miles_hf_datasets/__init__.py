"""Prompts from Hugging Face datasets: folders of `save_to_disk`, folders of data files, and names on the hub."""

from __future__ import annotations

import logging
from typing import Any

from pydantic import Field

from miles_core import BuildContext, Component, Environment, hookimpl
from miles_core.epochs import size_note
from miles_core.rows import RowOptions

TABLE = "data.hf-datasets"


class HfDatasetsConfig(RowOptions):
    """Options of the data source `hf-datasets`."""

    path: str = Field(min_length=1)
    """A folder that `save_to_disk` wrote, another folder that `datasets.load_dataset` understands, or a name on the hub:
    "openai/gsm8k"."""
    name: str | None = None
    """Configuration of the data set, where it has several: "main"."""
    split: str = "train"
    """Split, also a part of one for names on the hub: "train[:1000]"."""
    revision: str | None = None
    """Commit or tag on the hub; without one, a run may get other rows than the last."""


def _build(config: HfDatasetsConfig, context: BuildContext) -> Any:
    from miles_hf_datasets.source import build

    return build(config, context)


def _check(config: HfDatasetsConfig, environment: Environment) -> None:
    from miles_hf_datasets.source import count_rows

    if note := size_note(config, count_rows(config), environment, TABLE):
        logging.getLogger("miles.data.hf-datasets").warning(note)


@hookimpl
def miles_data_sources() -> list[Component[Any]]:
    return [
        Component(
            name="hf-datasets",
            summary="Prompts from a Hugging Face dataset, on disk or on the hub.",
            config=HfDatasetsConfig,
            build=_build,
            check=_check,
        )
    ]
