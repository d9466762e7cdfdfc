"""`hub:ORG/NAME`: a snapshot from the model hub, kept in the hub library's own cache."""

from __future__ import annotations

import re
import socket
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from miles_core.errors import ConfigError, RuntimeMissing
from miles_core.interfaces import ModelSource
from miles_hf_models.local import Report

FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
"""What a run needs; never a pickle, and no code."""


class HubSource(ModelSource):
    """What is cached is used without a network; a revision that names a commit is then exact."""

    def __init__(self, connect_timeout_s: float = 5.0) -> None:
        self.connect_timeout_s = connect_timeout_s

    def fetch(self, reference: str, revision: str | None, report: Report) -> Path:
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", reference):
            raise ConfigError(f'"hub:{reference}" does not name a model: write "hub:ORG/NAME"')
        try:
            import huggingface_hub as hub
            import huggingface_hub.constants
        except ImportError as error:
            raise RuntimeMissing(
                f"hub:{reference} needs huggingface_hub, which is not installed", _folder_hint()
            ) from error
        problem = "HF_HUB_OFFLINE is set" if hub.constants.HF_HUB_OFFLINE else self._unreachable(hub.constants.ENDPOINT)
        report("downloading", 0, 0)
        try:
            folder = Path(
                hub.snapshot_download(
                    reference,
                    revision=revision,
                    allow_patterns=list(FILES),
                    local_files_only=bool(problem),
                    etag_timeout=10,
                )
            )
        except Exception as error:  # the library's errors have no common base; each becomes one readable line
            raise RuntimeMissing(
                f'could not get the model "hub:{reference}": {problem or _first_line(error)}', _folder_hint()
            ) from error
        if not (folder / "config.json").is_file() or not list(folder.glob("*.safetensors")):
            raise RuntimeMissing(
                f'"hub:{reference}" has no config.json with safetensors weights in {folder}', _folder_hint()
            )
        return folder

    def _unreachable(self, endpoint: str) -> str:
        """Why the hub cannot be reached, or "". The library itself retries for minutes, so the door is tried first."""
        url = urlsplit(endpoint)
        if not urllib.request.proxy_bypass(url.hostname or ""):
            url = urlsplit(urllib.request.getproxies().get(url.scheme, endpoint))
        port = url.port or (443 if url.scheme == "https" else 80)
        try:
            socket.create_connection((url.hostname or "", port), timeout=self.connect_timeout_s).close()
        except OSError as error:
            return f"no network to {url.hostname} ({error})"
        return ""


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _folder_hint() -> str:
    return "give a Hugging Face folder instead: --set model.path=/path/to/folder"
