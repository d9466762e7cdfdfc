"""Stand-in: text-only models need no torchvision, but SGLang imports a few names from it. Using one raises."""

from typing import Any

__version__ = "0.0.0"


class _Absent:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("this is a stand-in for torchvision")

    def __class_getitem__(cls, item: Any) -> type:
        return cls


def absent(name: str) -> type:
    """A class under any name that is asked for, so that imports and annotations work."""
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (_Absent,), {})


def __getattr__(name: str) -> type:
    return absent(name)
