from torchvision import absent
from torchvision.transforms import InterpolationMode

__all__ = ["InterpolationMode"]


def __getattr__(name: str) -> type:
    return absent(name)
