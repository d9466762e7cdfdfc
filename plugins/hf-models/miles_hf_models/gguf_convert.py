"""A GGUF file -> a Hugging Face folder, in seconds: tensors are dequantized one by one and streamed to safetensors.

Covers what is known to convert exactly: Llama-shaped models with a byte-level BPE tokenizer. Anything else is refused
by name.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.errors import UserError

Report = Callable[[str, int, int], None]

CONVERTER = 1
"""Part of the cache folder's name: raise it when the output of this file changes."""

SHARD_NAME = "model.safetensors"

TENSOR_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF block tensor -> module under `model.layers.N`."""

ROOT_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

SPLIT_DIGITS = {"smollm": True, "gpt-2": False, "default": False}
"""`tokenizer.ggml.pre` -> whether each digit is a piece of its own before byte-level splitting."""

CONTROL_TOKEN = 3
"""`tokenizer.ggml.token_type` of special tokens."""


def convert(source: Path, target: Path, report: Report) -> None:
    """Writes config, generation config, tokenizer with chat template, and float32 weights into the existing folder
    `target`. Raises UserError for an architecture or tokenizer that is not known to convert exactly."""
    from gguf import GGUFReader

    reader = GGUFReader(str(source))
    architecture = _scalar(reader, "general.architecture")
    if architecture != "llama":
        raise UserError(
            f'cannot convert {source.name}: its architecture is "{architecture}", and only "llama" converts exactly',
            "convert it to a Hugging Face folder yourself and give that folder as [model] path",
        )
    config = llama_config(reader)
    _write_json(target / "config.json", config)
    write_tokenizer(reader, target, config["max_position_embeddings"])
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(target / "generation_config.json", ids)
    write_weights(reader, config, target / SHARD_NAME, report)


def llama_config(reader: Any) -> dict[str, Any]:
    """The Hugging Face `LlamaConfig` of a GGUF file, as a dict."""
    hidden = _scalar(reader, "llama.embedding_length")
    heads = _scalar(reader, "llama.attention.head_count")
    names = {tensor.name for tensor in reader.tensors}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": _scalar(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _scalar(reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _scalar(reader, "llama.attention.head_count_kv", heads),
        "head_dim": _scalar(reader, "llama.rope.dimension_count", hidden // heads),
        "max_position_embeddings": _scalar(reader, "llama.context_length"),
        # GGUF keeps the float32 nearest to 1e-05; the shortest decimal that means the same float32 is what was meant.
        "rms_norm_eps": float(str(np.float32(_scalar(reader, "llama.attention.layer_norm_rms_epsilon")))),
        "rope_theta": float(_scalar(reader, "llama.rope.freq_base", 10000.0)),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_up.bias" in names,
        "vocab_size": len(reader.fields["tokenizer.ggml.tokens"].data),
        "tie_word_embeddings": "output.weight" not in names,
        "bos_token_id": _scalar(reader, "tokenizer.ggml.bos_token_id", None),
        "eos_token_id": _scalar(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _scalar(reader, "tokenizer.ggml.padding_token_id", None),
        "torch_dtype": "float32",
        "use_cache": True,
    }


def write_tokenizer(reader: Any, target: Path, max_length: int) -> None:
    """`tokenizer.json` straight from the vocabulary and merges, `tokenizer_config.json`, and the chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind, pre = _scalar(reader, "tokenizer.ggml.model"), _scalar(reader, "tokenizer.ggml.pre", "default")
    if kind != "gpt2" or pre not in SPLIT_DIGITS:
        raise UserError(
            f'cannot convert the tokenizer "{kind}/{pre}" exactly; known: {", ".join(f"gpt2/{p}" for p in SPLIT_DIGITS)}',
            "convert the model to a Hugging Face folder yourself and give that folder as [model] path",
        )
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in reader.fields["tokenizer.ggml.merges"].contents()]
    types = reader.fields["tokenizer.ggml.token_type"].contents()
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)
    digits = [pre_tokenizers.Digits(individual_digits=True)] if SPLIT_DIGITS[pre] else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, type_ in zip(tokens, types, strict=True) if type_ == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    if len(tokens) != tokenizer.get_vocab_size():
        raise UserError(f"the converted tokenizer has {tokenizer.get_vocab_size()} tokens, the GGUF file {len(tokens)}")
    tokenizer.save(str(target / "tokenizer.json"))

    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {role: _scalar(reader, f"tokenizer.ggml.{key}_token_id", None) for role, key in roles.items()}
    _write_json(
        target / "tokenizer_config.json",
        {
            # Keeps tokenizer.json as it is; model-specific classes rebuild parts of it.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_length,
            **{role: tokens[i] for role, i in ids.items() if i is not None},
        },
    )
    template = _scalar(reader, "tokenizer.chat_template", None)
    if template is not None:
        (target / "chat_template.jinja").write_text(template, encoding="utf-8")


def write_weights(reader: Any, config: dict[str, Any], path: Path, report: Report) -> None:
    """Streams every tensor as float32; only one is in memory at a time."""
    shapes = {tensor.name: tuple(int(n) for n in reversed(tensor.shape)) for tensor in reader.tensors}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = 4 * int(np.prod(shape))
        header[hf_name(name)] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        done = 0
        for array in _float_tensors(reader, config):
            file.write(memoryview(array).cast("B"))
            done += array.nbytes
            report("converting", done, offset)


def hf_name(name: str) -> str:
    """The Hugging Face parameter of a GGUF tensor; raises UserError for one that a Llama does not have."""
    parts = name.split(".")
    if parts[0] in ROOT_NAMES and len(parts) == 2:
        return f"{ROOT_NAMES[parts[0]]}.{parts[1]}"
    if parts[0] == "blk" and len(parts) == 4 and parts[2] in TENSOR_NAMES:
        return f"model.layers.{parts[1]}.{TENSOR_NAMES[parts[2]]}.{parts[3]}"
    raise UserError(f'the GGUF file holds the tensor "{name}", which has no place in a Llama model')


def interleaved_to_halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes the row order of q and k projections that GGUF wants: rotary pairs (2i, 2i + 1) of each head go back to
    (i, i + head_dim / 2). `weight` [num_heads * head_dim, ...]."""
    head_dim = weight.shape[0] // num_heads
    pairs = weight.reshape(num_heads, head_dim // 2, 2, *weight.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weight.shape))


def _float_tensors(reader: Any, config: dict[str, Any]) -> Iterator[np.ndarray]:
    from gguf import dequantize

    for tensor in reader.tensors:
        array = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if ".attn_q." in tensor.name:
            array = interleaved_to_halves(array, config["num_attention_heads"])
        elif ".attn_k." in tensor.name:
            array = interleaved_to_halves(array, config["num_key_value_heads"])
        yield array


_REQUIRED = object()


def _scalar(reader: Any, key: str, default: Any = _REQUIRED) -> Any:
    field = reader.fields.get(key)
    if field is not None:
        return field.contents()
    if default is _REQUIRED:
        raise UserError(f'the GGUF file lacks "{key}"')
    return default


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not None}, indent=2) + "\n", encoding="utf-8")
