"""`[trainer.megatron.args]`: from a table of Megatron's own argument names to the installed Megatron's namespace.

Nothing is re-declared: names, types, choices and rules are those of Megatron's parser and of its `validate_args`. What is
here is which arguments this trainer honours; any other is refused by name rather than accepted and ignored.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import io
import logging
import os
import traceback
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from miles_core.errors import ConfigError
from miles_megatron_trainer import names
from miles_megatron_trainer.cpu import megatron_device

HONOURED = frozenset({
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "sequence_parallel",
    "lr", "min_lr", "lr_decay_style", "lr_decay_iters", "lr_warmup_iters", "lr_warmup_fraction", "lr_warmup_init",
    "lr_wsd_decay_style", "lr_wsd_decay_iters",
    "weight_decay", "start_weight_decay", "end_weight_decay", "weight_decay_incr_style",
    "adam_beta1", "adam_beta2", "adam_eps", "clip_grad", "use_distributed_optimizer",
    "recompute_granularity", "recompute_method", "recompute_num_layers",
    "make_vocab_size_divisible_by", "bf16",
})  # fmt: skip
"""Arguments with an effect here, each of them under test."""

DEFAULTS: dict[str, Any] = {
    "lr": 1e-6, "lr_decay_style": "constant", "weight_decay": 0.0, "adam_beta2": 0.95, "make_vocab_size_divisible_by": 1,
}  # fmt: skip
"""Where this trainer's defaults are not Megatron's: those of the trainer `fsdp`, so that a run may change trainers."""

FROM_MODEL = frozenset({
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "group_query_attention", "num_query_groups",
    "kv_channels", "layernorm_epsilon", "normalization", "swiglu", "position_embedding_type", "rotary_base",
    "add_bias_linear", "add_qkv_bias", "qk_layernorm", "untie_embeddings_and_output_weights", "max_position_embeddings",
    "vocab_size", "padded_vocab_size",
})  # fmt: skip

LOW_PRECISION = ("fp8", "fp4", "first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", "te_")


@functools.cache
def parser() -> argparse.ArgumentParser:
    """Megatron's own."""
    with megatron_device(), quiet():
        from megatron.training.arguments import add_megatron_arguments

        made = _Parser(prog="megatron", allow_abbrev=False, add_help=False)
        add_megatron_arguments(made)
        return made


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ValueError(message)


@contextlib.contextmanager
def quiet() -> Any:
    """Megatron prints its arguments and warns of every library that it does without."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def parse_table(table: Mapping[str, Any], where: str) -> list[str]:
    """The table as command-line words. Raises ConfigError that starts with `where` and the argument: unknown (with the
    nearest name), set by the model's folder, or without an effect here."""
    known = {action.dest: action for action in parser()._actions}
    words: list[str] = []
    for key, value in table.items():
        name = key.replace("-", "_")
        place = f"{where}.args.{key}"
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise ConfigError(
                f"{place}: the installed Megatron has no argument of this name",
                *([f'did you mean "{near[0]}"?'] if near else []),
            )
        _refuse(name, value, place)
        words += _words(known[name], value, place)
    return words


def _refuse(name: str, value: Any, place: str) -> None:
    if name in FROM_MODEL:
        raise ConfigError(f"{place}: comes from the model's config.json", "leave it out, or choose another model")
    if name.startswith(LOW_PRECISION) and find_spec("transformer_engine") is None:
        raise ConfigError(
            f"{place}: needs Transformer Engine, which is not installed; Megatron would accept it and ignore it",
            "leave it out",
        )
    if name not in HONOURED:
        raise ConfigError(
            f"{place}: an argument of Megatron that this trainer does not honour",
            f"it honours: {', '.join(sorted(HONOURED))}",
        )


def _words(action: argparse.Action, value: Any, place: str) -> list[str]:
    option = max(action.option_strings, key=len)
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ConfigError(f"{place}: a switch, true or false, not {value!r}")
        const = getattr(action, "const", True)
        return [option] if value is const else []
    if isinstance(action, argparse.BooleanOptionalAction):
        return [option if value else "--no-" + option.removeprefix("--")]
    if isinstance(value, bool | dict):
        raise ConfigError(f"{place}: {value!r} is not a value of {option}")
    return [option, *(str(v) for v in (value if isinstance(value, list | tuple) else [value]))]


def resolve(
    table: Mapping[str, Any], hf: Mapping[str, Any], *, world_size: int, total_steps: int, where: str
) -> argparse.Namespace:
    """Megatron's validated arguments for a model on `world_size` ranks and `total_steps` optimizer steps.

    Raises ConfigError with `where` and what Megatron says."""
    words = parse_table({**DEFAULTS, **{k.replace("-", "_"): v for k, v in table.items()}}, where)
    with megatron_device(), quiet():
        from megatron.training.arguments import core_transformer_config_from_args, validate_args

        try:
            args = parser().parse_args([*_model_words(hf), *words])
        except ValueError as error:
            raise ConfigError(f"{where}.args: {error}", "so says Megatron's parser") from error
        args.rank, args.world_size, args._is_global_batch_size_explicitly_specified = 0, world_size, True
        args.train_iters = max(total_steps, 1)
        _check_layout(args, hf, world_size, where)
        _check_schedule(args, where)
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        try:
            validate_args(args)
            core_transformer_config_from_args(args)
        except (AssertionError, ValueError, RuntimeError, TypeError) as error:
            failed = traceback.extract_tb(error.__traceback__)[-1].line  # many of its assertions have no words
            raise ConfigError(f"{where}.args: {str(error) or failed}", "so says the installed Megatron") from error
    per = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    args.padded_vocab_size = -(-hf["vocab_size"] // per) * per
    return args


def warmup_and_decay(args: argparse.Namespace) -> tuple[float, int]:
    """Optimizer steps of the warm-up and of the whole schedule."""
    decay = args.lr_decay_iters or args.train_iters
    return (args.lr_warmup_fraction * decay if args.lr_warmup_fraction is not None else args.lr_warmup_iters), decay


def _check_schedule(args: argparse.Namespace, where: str) -> None:
    """What Megatron's schedule asserts when it is built, which is after the model has loaded."""
    warmup, decay = warmup_and_decay(args)
    if warmup >= decay:
        raise ConfigError(
            f"{where}.args: a warm-up of {warmup:g} optimizer steps in a schedule of {decay}",
            "make it shorter, or set lr_decay_iters beyond it; the run has "
            f"{args.train_iters} optimizer steps (steps x minibatches x epochs)",
        )
    if not 0 <= (args.min_lr or 0.0) <= args.lr or not 0 <= args.lr_warmup_init <= args.lr:
        raise ConfigError(
            f"{where}.args.lr: {args.lr:g} is less than min_lr {args.min_lr or 0:g} or lr_warmup_init "
            f"{args.lr_warmup_init:g}, or one of them is negative"
        )
    if args.lr_decay_style == "WSD" and args.lr_wsd_decay_iters is None:
        raise ConfigError(f'{where}.args.lr_decay_style: "WSD" needs lr_wsd_decay_iters')


def _check_layout(args: argparse.Namespace, hf: Mapping[str, Any], world_size: int, where: str) -> None:
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    for name, size in (("tensor", tp), ("pipeline", pp)):
        if size < 1:
            raise ConfigError(f"{where}.args.{name}_model_parallel_size: {size} is not a number of ranks")
    if cp < 1:
        raise ConfigError(f"{where}.args.context_parallel_size: {cp} is not a number of ranks")
    if world_size % (tp * pp * cp):
        raise ConfigError(
            f"{where}.args: {tp} tensor times {pp} pipeline times {cp} context ranks do not divide trainer.num_workers = "
            f"{world_size}",
            f"set trainer.num_workers to a multiple of {tp * pp * cp}",
        )
    heads = (("num_key_value_heads", "key-value heads"), ("num_attention_heads", "attention heads"))
    for key, what in (*heads, ("intermediate_size", "rows of its MLP")):
        if hf[key] % tp:
            raise ConfigError(f"{where}.args.tensor_model_parallel_size: {tp} does not divide the model's {hf[key]} {what}")
    if hf["num_key_value_heads"] // tp % cp:
        raise ConfigError(
            f"{where}.args.context_parallel_size: {cp} does not divide the {hf['num_key_value_heads'] // tp} key-value "
            "heads of a tensor rank, which context ranks share out"
        )
    if hf["num_hidden_layers"] % pp:
        raise ConfigError(
            f"{where}.args.pipeline_model_parallel_size: {pp} does not divide the model's {hf['num_hidden_layers']} layers"
        )
    if args.sequence_parallel and tp == 1:
        raise ConfigError(f"{where}.args.sequence_parallel: needs tensor_model_parallel_size above 1")
    if args.recompute_granularity == "selective":
        raise ConfigError(f'{where}.args.recompute_granularity: "selective" is not supported', 'use "full"')


def _model_words(hf: Mapping[str, Any]) -> list[str]:
    """What the model's folder says, and what this trainer does itself."""
    values = {
        "--num-layers": hf["num_hidden_layers"],
        "--hidden-size": hf["hidden_size"],
        "--ffn-hidden-size": hf["intermediate_size"],
        "--num-attention-heads": hf["num_attention_heads"],
        "--num-query-groups": hf["num_key_value_heads"],
        "--kv-channels": hf["head_dim"],
        "--norm-epsilon": hf["rms_norm_eps"],
        "--normalization": "RMSNorm",
        "--position-embedding-type": "rope",
        "--max-position-embeddings": hf["max_position_embeddings"],
        "--seq-length": hf["max_position_embeddings"],
        "--vocab-size": hf["vocab_size"],
        "--transformer-impl": "local",
        "--micro-batch-size": 1,
        "--global-batch-size": 1 << 20,
        "--hidden-dropout": 0.0,
        "--attention-dropout": 0.0,
    }
    switches = ["--group-query-attention", "--swiglu", "--disable-bias-linear", "--use-cpu-initialization"]
    switches += ["--no-persist-layer-norm", "--no-masked-softmax-fusion", "--no-bias-swiglu-fusion", "--no-rope-fusion"]
    switches += ["--no-bias-dropout-fusion", "--no-gradient-accumulation-fusion", "--calculate-per-token-loss"]
    switches += ["--no-check-for-nan-in-loss-and-grad"]  # this trainer's own check names loss and samples
    if names.has_qk_norm(hf):
        switches.append("--qk-layernorm")
    if names.has_qkv_bias(hf):
        switches.append("--add-qkv-bias")
    if not hf.get("tie_word_embeddings"):
        switches.append("--untie-embeddings-and-output-weights")
    return [str(word) for pair in values.items() for word in pair] + switches
