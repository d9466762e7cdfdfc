"""A reward that waits as long as a file exists, so that a test can look at a run in the middle of a step; it leaves a file
`.seen` beside that one when it has come to wait."""

from __future__ import annotations

from pathlib import Path

PLUGIN = """
import time
from pathlib import Path
import miles_core

@miles_core.reward("held")
def held(sample, *, file: str = ""):
    while Path(file).exists():
        Path(file + ".seen").touch()
        time.sleep(0.02)
    return float(sample.response[:1] == str(sample.prompt.label))
"""


def hold(config: Path) -> tuple[Path, list[str]]:
    """Makes `config` use the reward; the file, and what the command line needs."""
    file, plugin = config.with_name("hold"), config.with_name("held_plugin.py")
    plugin.write_text(PLUGIN)
    config.write_text(
        config.read_text().replace('[[reward]]\nuse = "toy"', f'[[reward]]\nuse = "held"\nheld.file = "{file}"')
    )
    return file, ["--plugin-file", str(plugin)]
