"""The source: a data set opened by the library `datasets`, whose rows are read from a memory-mapped file when asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from miles_core.component import BuildContext
from miles_core.epochs import ListSource
from miles_core.errors import ConfigError, DataError, RuntimeMissing
from miles_core.rows import Digest, Names, Place, RowMaker
from miles_core.types import Prompt
from miles_hf_datasets import TABLE, HfDatasetsConfig

INSTALL = 'pip install "miles-hf-datasets[runtime]"'
SAVED = ("state.json", "dataset_dict.json")
"""One of them stands in every folder of `save_to_disk`."""
ALTERNATIVES = (
    f"{TABLE}.path may name a folder that save_to_disk wrote on a machine with a network",
    'or use = "files" with data.files.path, for parquet and JSON lines (miles-file-data)',
)
_checked: dict[tuple[HfDatasetsConfig, str], str] = {}
"""SHA-256 of data sets that this process has read and checked: the check, the run and every evaluation open them anew."""


class Rows:
    """Prompts by number, made when they are asked for."""

    def __init__(self, dataset: Any, config: HfDatasetsConfig) -> None:
        self.dataset, self.maker = dataset, RowMaker(config, TABLE)
        self.label = config.path if config.split is None else f"{config.path} ({config.split})"

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> Prompt:
        return self._make(number, self.dataset[number])[1]

    def all(self) -> Iterator[tuple[Place, Prompt]]:
        """Every row in order, read in portions."""
        return (self._make(number, row) for number, row in enumerate(self.dataset))

    def _make(self, number: int, row: Any) -> tuple[Place, Prompt]:
        place = Place(self.label, number + 1, arrow=True)
        return place, self.maker.make(row, place, number + 1)


def build(config: HfDatasetsConfig, context: BuildContext) -> ListSource:
    rows = Rows(open_dataset(config), config)
    return ListSource(config, context, rows, check_rows(rows, config))


def count_rows(config: HfDatasetsConfig) -> int:
    """Reads and checks everything. Raises DataError for the first bad row, an id that comes twice, and no rows."""
    rows = Rows(open_dataset(config), config)
    check_rows(rows, config)
    return len(rows)


def check_rows(rows: Rows, config: HfDatasetsConfig) -> str:
    """The SHA-256 of all rows, of which each was checked; 8 bytes a row are held meanwhile."""
    key = (config, str(rows.dataset._fingerprint))
    if key not in _checked:
        names, digest = Names(), Digest()
        for _, prompt in rows.all():
            names.add(prompt.id)
            digest.add(prompt)
        if not len(rows):
            raise DataError(f"{rows.label} has no rows")
        names.check(rows.all(), rows.maker)
        _checked[key] = digest.hex()
    return _checked[key]


def open_dataset(config: HfDatasetsConfig) -> Any:
    """The split as a map-style dataset of plain Python values, with the columns that the options name.

    Raises RuntimeMissing without the library or the network, DataError where there is no such data set or split.
    """
    try:
        import datasets
    except ImportError:
        raise RuntimeMissing("hf-datasets needs the library datasets", INSTALL) from None
    dataset = _open(config, datasets)
    if config.metadata_keys is not None:
        o = config
        keys = (o.prompt_key, o.messages_key, o.label_key, o.id_key, o.task_key, o.tools_key, *config.metadata_keys)
        names = dataset.column_names
        wanted = {key if key in names else key.partition(".")[0] for key in keys}
        dataset = dataset.select_columns([name for name in names if name in wanted])
    return dataset.with_format(None)


def _open(config: HfDatasetsConfig, datasets: Any) -> Any:
    folder = Path(config.path).expanduser()
    if folder.is_file():
        raise DataError(f"{config.path} is a file ({TABLE}.path)", 'use = "files" reads parquet and JSON lines')
    if folder.is_dir() and any((folder / name).is_file() for name in SAVED):
        return _saved(config, folder, datasets)
    if not folder.is_dir() and (folder.is_absolute() or config.path.startswith((".", "~"))):
        raise DataError(f"there is no folder {config.path} ({TABLE}.path)", f"relative paths start from {Path.cwd()}")
    return _loaded(config, str(folder) if folder.is_dir() else config.path, datasets)


def _saved(config: HfDatasetsConfig, folder: Path, datasets: Any) -> Any:
    """A folder of `save_to_disk`: one data set, or one for each split."""
    if config.name is not None or config.revision is not None:
        raise ConfigError(f"{TABLE}.name and revision are for data sets on the hub; {config.path} is a saved folder")
    try:
        found = datasets.load_from_disk(str(folder))
    except Exception as error:
        raise DataError(f"{config.path} is no complete folder of save_to_disk: {error}") from error
    if not isinstance(found, datasets.DatasetDict):
        own = found.split
        if config.split not in ("train", str(own)):
            raise DataError(f'{config.path} has no split "{config.split}": it is one data set', f"leave {TABLE}.split out")
        return found
    if config.split not in found:
        raise DataError(f'{config.path} has no split "{config.split}" ({TABLE}.split)', f"its splits: {', '.join(found)}")
    return found[config.split]


def _loaded(config: HfDatasetsConfig, path: str, datasets: Any) -> Any:
    """A folder of data files, or a name on the hub."""
    where = f'the data set "{config.path}" ({TABLE}.path)'
    if path in _formats():
        raise DataError(
            f'"{path}" is a format and no data set ({TABLE}.path)', 'use = "files" reads parquet and JSON lines'
        )
    try:
        return datasets.load_dataset(path, config.name, split=config.split, revision=config.revision)
    except ConnectionError as error:
        raise RuntimeMissing(f"{where} cannot be fetched: {error}", *ALTERNATIVES) from error
    except datasets.exceptions.DatasetNotFoundError as error:
        raise DataError(f"{where} is not on the hub, or not readable without a token: {error}", *ALTERNATIVES) from error
    except Exception as error:
        raise DataError(f"{where} cannot be opened: {error}", f"name, split and revision stand in [{TABLE}]") from error


def _formats() -> frozenset[str]:
    """Names that `load_dataset` takes for a file format: it would read whatever lies in the current folder."""
    from datasets import packaged_modules

    return frozenset(getattr(packaged_modules, "_PACKAGED_DATASETS_MODULES", ()))
