"""A plugin with one component of each kind that a config must choose, and a config that chooses them."""

from __future__ import annotations

from importlib.metadata import PathDistribution
from pathlib import Path
from typing import Any

from dists import Dists

from miles_core.config import ResolvedRun, load

SOURCE = '''
from pathlib import Path
from typing import Literal
from pydantic import Field, field_validator
from miles_core import Component, ComponentConfig, hookimpl
from miles_core.fields import FieldSpec

class Schedule(ComponentConfig):
    warmup: int = Field(default=0, ge=0)
    """Steps."""

class TrainerOptions(ComponentConfig):
    learning_rate: float = Field(default=1e-6, gt=0)
    """Peak."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Adam."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Format."""
    schedule: Schedule = Schedule()
    """Over time."""

class EngineOptions(ComponentConfig):
    mem_fraction: float = 0.8
    """Share."""
    server_args: dict[str, object] = Field(default_factory=dict)
    """Handed on."""
    cache: Path | None = None
    """Folder."""

class RewardOptions(ComponentConfig):
    strict: bool = True
    """Exactly."""
    api_key: str = ""
    """Of a service."""
    url: str = ""
    """Of a service."""

    @field_validator("url")
    @classmethod
    def http(cls, value):
        if value and not value.startswith("http"):
            raise ValueError("must start with http")
        return value

class LossOptions(ComponentConfig):
    kl: float = Field(default=0.0, ge=0)
    """Coefficient."""

def build(config, context):
    return (context.component, config, context)

def part(kind, name, **kw):
    return Component(**{"name": name, "summary": f"{kind} of acme", "build": build} | kw)

@hookimpl
def miles_data_sources(): return [part("data", "rows")]
@hookimpl
def miles_tokenizers(): return [part("tokenizer", "bytes")]
@hookimpl
def miles_rollouts(): return [part("rollout", "turn")]
@hookimpl
def miles_engines():
    return [part("engine", "plain", provides=frozenset({"weights/direct"})), part("engine", "fast", config=EngineOptions)]
@hookimpl
def miles_rewards():
    return [part("reward", "maths", config=RewardOptions, secrets=("ACME_KEY",)), part("reward", "length")]
@hookimpl
def miles_losses():
    return [part("loss", "clip", config=LossOptions, needs=lambda c: frozenset({"old_logprobs"}),
                 requires=lambda c: ("role/reference",) if c.kl > 0 else ())]
@hookimpl
def miles_trainers(): return [part("trainer", "shard", config=TrainerOptions)]
@hookimpl
def miles_model_sources(): return [part("source", "vault")]
@hookimpl
def miles_model_specs(): return [part("model", "llama", traits={"architectures": ("LlamaForCausalLM",)})]
@hookimpl
def miles_sample_fields(): return [FieldSpec(name="acme_route", dtype="int32")]
'''

CONFIG = """\
steps = 3
[tokenizer]
use = "bytes"
[data]
use = "rows"
[rollout]
use = "turn"
groups_per_step = 4
samples_per_group = 2
[engine]
use = "plain"
[engine.fast]
mem_fraction = 0.5
[[reward]]
use = "maths"
[[loss]]
use = "clip"
[trainer]
use = "shard"
[trainer.shard]
learning_rate = 1e-4
"""


def install(dists: Dists) -> list[PathDistribution]:
    dists.add("acme", SOURCE, version="1.2")
    return dists.all


def write(folder: Path, text: str = CONFIG, name: str = "x.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def changed(*edits: tuple[str, str]) -> str:
    """CONFIG with each (old, new) replaced; an old text that is not there fails the test."""
    text = CONFIG
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new, 1)
    return text


def run_of(dists: Dists, text: str = CONFIG, *sets: str, **kwargs: Any) -> ResolvedRun:
    """The run that `text` and `sets` describe, on acme alone."""
    if not dists.all:
        install(dists)
    return load(write(dists.root, text), sets=sets, distributions=dists.all, **kwargs)
