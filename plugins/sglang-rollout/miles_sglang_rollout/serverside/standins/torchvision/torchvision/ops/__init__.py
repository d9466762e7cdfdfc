from torchvision import absent


def __getattr__(name: str) -> type:
    return absent(name)
