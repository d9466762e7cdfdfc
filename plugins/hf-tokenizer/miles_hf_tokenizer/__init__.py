"""The tokenizer and chat template of a Hugging Face folder."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from miles_core import BuildContext, Component, ComponentConfig, Environment, hookimpl
from miles_core.errors import ConfigError


class HfTokenizerConfig(ComponentConfig):
    """Options of the tokenizer `hf`."""

    path: str = ""
    """Folder of another tokenizer; the model's own when empty."""
    template_options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Variables handed to the chat template, for example {enable_thinking = false}."""


def _build(config: HfTokenizerConfig, context: BuildContext) -> Any:
    from miles_hf_tokenizer.tokenizer import HfTokenizer, read_template

    return HfTokenizer(
        config.path or context.model_path,
        chat_template=read_template(context.run_config.tokenizer.chat_template),
        template_options=config.template_options,
    )


def _check(config: HfTokenizerConfig, environment: Environment) -> None:
    from miles_hf_tokenizer.tokenizer import check_folder, read_template

    read_template(environment.run_config.tokenizer.chat_template)
    if not config.path and not environment.model_path:
        raise ConfigError(
            "the tokenizer of which model? model.path is empty, and so is tokenizer.hf.path",
            "name a Hugging Face folder in either, or choose another tokenizer (tokenizer.use)",
        )
    check_folder(config.path or environment.model_path)


@hookimpl
def miles_tokenizers() -> list[Component[Any]]:
    return [
        Component(
            name="hf",
            summary="Tokenizer and chat template of a Hugging Face folder.",
            config=HfTokenizerConfig,
            build=_build,
            check=_check,
        )
    ]
