"""A whole run in numpy: tokenizer, data, engine, trainer and reward, all named `toy`, for tests and first steps.

A prompt shows two digits ("3,4="); the policy starts by answering any digit and learns the right one in seconds. The
components are built in (`use = "toy"`); as a module this file is also an ordinary plugin.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field

from miles_core.component import BuildContext, Component, ComponentConfig
from miles_core.errors import ConfigError
from miles_core.hookspecs import hookimpl
from miles_core.interfaces import DataSource, Tokenizer
from miles_core.testing import toy_model as model
from miles_core.types import Prompt, PromptTokens, Sample

# --- Tokenizer -------------------------------------------------------------------------------------------------------

_ROLES = {"system": model.SYSTEM, "user": model.USER, "assistant": model.ASSISTANT, "tool": model.TOOL}
TEMPLATE = "<bos> then per message <role>content, and <eos> after the assistant's; tools as one system message of JSON"


class ToyTokenizer(Tokenizer):
    """One token per ASCII character, and a token per role."""

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = (), images: Sequence[Any] = ()
    ) -> PromptTokens:
        if images:
            raise ConfigError("tokenizer toy renders no images")
        listed = [{"role": "system", "content": json.dumps(tool, sort_keys=True, default=str)} for tool in tools]
        ids = [model.BOS]
        for message in (*listed, *messages):
            role = message["role"]
            if role not in _ROLES:
                raise ConfigError(f'tokenizer toy knows no role "{role}"; it has {", ".join(_ROLES)}')
            ids += [_ROLES[role], *map(model.token_id, message.get("content") or "")]
            if role == "assistant":
                ids.append(model.EOS)
        if messages and messages[-1]["role"] == "assistant":
            ids.pop()
        else:
            ids.append(model.ASSISTANT)
        return self._prompt(ids)

    def encode(self, text: str) -> PromptTokens:
        return self._prompt([model.BOS, *map(model.token_id, text)])

    def decode(self, token_ids: Sequence[int] | np.ndarray, *, skip_special: bool = True) -> str:
        special = len(model.SPECIAL)
        return "".join(
            model.CHARACTERS[i - special] if i >= special else "" if skip_special else model.SPECIAL[i]
            for i in map(int, token_ids)
        )

    def _prompt(self, ids: list[int]) -> PromptTokens:
        return PromptTokens(token_ids=np.array(ids, dtype=np.int32), text=self.decode(ids, skip_special=False))

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return (model.EOS,)

    @property
    def vocab_size(self) -> int:
        return model.VOCAB_SIZE

    @property
    def template_hash(self) -> str:
        return hashlib.sha256(TEMPLATE.encode()).hexdigest()


# --- Data ------------------------------------------------------------------------------------------------------------


class ToyDataConfig(ComponentConfig):
    """Options of data source `toy`."""

    task: Literal["copy", "add"] = "copy"
    """"copy": the first of two digits, learned in 40 steps; "add": the last digit of their sum, learned slowly."""
    num_prompts: int = Field(default=100, gt=0, le=100)
    """Different prompts, of the hundred that there are."""
    epochs: int = Field(default=0, ge=0)
    """Passes over the prompts; 0 never ends."""


class ToyData(DataSource):
    """Each epoch is a permutation of its own; the cursor is the number of prompts taken."""

    def __init__(self, config: ToyDataConfig, seed: int) -> None:
        self.config, self.seed = config, seed
        self.taken = 0
        self._pairs = np.random.default_rng([seed, 1]).permutation(100)[: config.num_prompts]
        self._order: tuple[int, np.ndarray] | None = None

    @property
    def num_prompts(self) -> int | None:
        return self.config.num_prompts

    def next(self, n: int) -> list[Prompt]:
        limit = self.config.epochs * self.config.num_prompts
        stop = min(self.taken + n, limit) if limit else self.taken + n
        prompts = [self._prompt(draw) for draw in range(self.taken, stop)]
        self.taken = stop
        return prompts

    def _prompt(self, draw: int) -> Prompt:
        epoch, place = divmod(draw, self.config.num_prompts)
        if self._order is None or self._order[0] != epoch:
            order = np.random.default_rng([self.seed, 2, epoch]).permutation(self.config.num_prompts)
            self._order = (epoch, order)
        a, b = divmod(int(self._pairs[self._order[1][place]]), 10)
        question, answer = (f"{a}+{b}=", (a + b) % 10) if self.config.task == "add" else (f"{a},{b}=", a)
        name = f"{self.config.task}-{a}{b}"
        return Prompt(id=name, draw=draw, messages=[{"role": "user", "content": question}], label=str(answer))

    def state(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.taken = int(state["taken"])


# --- Reward ----------------------------------------------------------------------------------------------------------


class ToyReward:
    """1 when the answer is the prompt's label, else 0."""

    def score(self, sample: Sample) -> float:
        if sample.prompt is None or sample.prompt.label is None:
            raise ValueError("reward toy compares with the prompt's label, and there is none")
        return float(sample.response.strip() == str(sample.prompt.label))


# --- Components ------------------------------------------------------------------------------------------------------


def _build_engine(config: Any, context: BuildContext) -> Any:
    from miles_core.testing.toy_engine import ToyEngine

    return ToyEngine(config, context)


def _build_trainer(config: Any, context: BuildContext) -> Any:
    from miles_core.testing.toy_trainer import ToyTrainer

    return ToyTrainer(config, context)


ENGINE_CAPABILITIES = frozenset({"score", "sleep", "weights/ipc", "weights/path"})


class ToyEngineConfig(ComponentConfig):
    """Options of engine `toy`."""

    token_seconds: float = Field(default=0.0, ge=0)
    """Seconds that each token takes, to imitate a slow model."""
    cache_entries: int = Field(default=4096, ge=0)
    """Prefixes whose next-token logits are kept; 0 switches the prefix cache off."""


class ToyTrainerConfig(ComponentConfig):
    """Options of trainer `toy`."""

    lr: float = Field(default=0.02, gt=0)
    """Learning rate of Adam."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    microbatch_tokens: int = Field(default=0, ge=0)
    """Most trainable tokens per pass; 0 takes all at once. It cannot change the result, only the memory."""


COMPONENTS: dict[str, list[Component[Any]]] = {
    "miles_tokenizers": [
        Component(name="toy", summary="One token per character (numpy toy)", build=lambda config, context: ToyTokenizer())
    ],
    "miles_data_sources": [
        Component(
            name="toy",
            summary="Questions about two digits (numpy toy)",
            config=ToyDataConfig,
            build=lambda config, context: ToyData(config, context.seed),
        )
    ],
    "miles_engines": [
        Component(
            name="toy",
            summary="Samples the numpy toy policy",
            config=ToyEngineConfig,
            build=_build_engine,
            provides=ENGINE_CAPABILITIES,
        )
    ],
    "miles_rewards": [
        Component(name="toy", summary="1 when the answer is the label", build=lambda config, context: ToyReward())
    ],
    "miles_trainers": [
        Component(name="toy", summary="Trains the numpy toy policy", config=ToyTrainerConfig, build=_build_trainer)
    ],
}


@hookimpl
def miles_tokenizers() -> list[Component[Any]]:
    return COMPONENTS["miles_tokenizers"]


@hookimpl
def miles_data_sources() -> list[Component[Any]]:
    return COMPONENTS["miles_data_sources"]


@hookimpl
def miles_engines() -> list[Component[Any]]:
    return COMPONENTS["miles_engines"]


@hookimpl
def miles_rewards() -> list[Component[Any]]:
    return COMPONENTS["miles_rewards"]


@hookimpl
def miles_trainers() -> list[Component[Any]]:
    return COMPONENTS["miles_trainers"]
