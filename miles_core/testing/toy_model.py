"""The toy policy: a numpy network that is small enough to sample and train in microseconds, and really learns.

logits(context) = BIGRAM[last token] + tanh(sum_w EMBED[w, token at place w] + BIAS) @ HEAD over a window of the last WINDOW
tokens. Shape letters: N contexts, W window, H hidden, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.errors import ConfigError

SPECIAL = ("<bos>", "<eos>", "<system>", "<user>", "<assistant>", "<tool>", "<unk>")
BOS, EOS, SYSTEM, USER, ASSISTANT, TOOL, UNK = range(len(SPECIAL))
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
VOCAB_SIZE = len(SPECIAL) + len(CHARACTERS)
WINDOW = 6
HIDDEN = 64
EMPTY = VOCAB_SIZE
"""Stands in the window before the first token."""
CONTEXT = 1024
"""The longest prompt and response together, unless `[model] max_context` says less."""

Params = dict[str, np.ndarray]
SHAPES: dict[str, tuple[int, ...]] = {
    "bias": (HIDDEN,),
    "bigram": (VOCAB_SIZE + 1, VOCAB_SIZE),
    "embed": (WINDOW, VOCAB_SIZE + 1, HIDDEN),
    "head": (HIDDEN, VOCAB_SIZE),
}


def token_id(character: str) -> int:
    """Id of one character; <unk> for those that the toy does not know."""
    place = CHARACTERS.find(character)
    return len(SPECIAL) + place if place >= 0 else UNK


def initial_params(seed: int) -> Params:
    """float32 parameters that speak like a pretrained model which knows the format but no answer: after <assistant> a
    digit, each with about the same probability, and after the digit the end."""
    rng = np.random.default_rng([seed, 0x70])
    digits = [token_id(c) for c in "0123456789"]
    bigram = np.zeros(SHAPES["bigram"])
    bigram[:, digits] = 6.0
    bigram[digits, EOS] = 11.0
    params = {
        "bias": np.zeros(HIDDEN),
        "bigram": bigram,
        "embed": rng.normal(0, 0.3, SHAPES["embed"]),
        "head": rng.normal(0, 0.02, SHAPES["head"]),
    }
    return {name: value.astype(np.float32) for name, value in params.items()}


def load_params(seed: int, folder: Path | None) -> Params:
    """The toy in `folder`, or a fresh one for `seed` when there is none."""
    return initial_params(seed) if folder is None else read_model(folder)


def windows(tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """int64[N, W]: the tokens before each position, the last one in the last place."""
    padded = np.concatenate([np.full(WINDOW, EMPTY, dtype=np.int64), tokens.astype(np.int64)])
    return padded[positions[:, None] + np.arange(WINDOW)[None, :]]


def hidden(params: Params, context: np.ndarray) -> np.ndarray:
    """float64[N, H] for contexts [N, W]."""
    rows = params["embed"].astype(np.float64)[np.arange(WINDOW)[None, :], context].sum(axis=1)
    return np.tanh(rows + params["bias"])


def logits(params: Params, context: np.ndarray, hidden_nh: np.ndarray | None = None) -> np.ndarray:
    """float64[N, V] for contexts [N, W]."""
    h = hidden(params, context) if hidden_nh is None else hidden_nh
    return params["bigram"][context[:, -1]].astype(np.float64) + h @ params["head"].astype(np.float64)


def log_softmax(values: np.ndarray) -> np.ndarray:
    shifted = values - values.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def gradients(params: Params, context: np.ndarray, hidden_nh: np.ndarray, dlogits: np.ndarray) -> Params:
    """float64 gradient of every parameter, given the gradient [N, V] of the logits."""
    dhidden = (dlogits @ params["head"].astype(np.float64).T) * (1.0 - hidden_nh**2)
    grads = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    grads["head"] += hidden_nh.T @ dlogits
    grads["bias"] += dhidden.sum(axis=0)
    np.add.at(grads["bigram"], context[:, -1], dlogits)
    for place in range(WINDOW):
        np.add.at(grads["embed"][place], context[:, place], dhidden)
    return grads


def state_hash(params: Params) -> str:
    """SHA-256 over all parameters in name order: equal on both sides of a correct push."""
    digest = hashlib.sha256()
    for name in sorted(params):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(params[name]).tobytes())
    return digest.hexdigest()


# --- Files -----------------------------------------------------------------------------------------------------------

_DTYPES = {"F32": np.dtype("<f4"), "F64": np.dtype("<f8"), "I64": np.dtype("<i8")}


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """A safetensors file: the length of a JSON header (8 bytes), the header, the bytes of all tensors."""
    names = {dtype: name for name, dtype in _DTYPES.items()}
    header: dict[str, Any] = {}
    offset = 0
    for name, value in tensors.items():
        header[name] = {
            "dtype": names[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [offset, offset + value.nbytes],
        }
        offset += value.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for value in tensors.values():
            file.write(np.ascontiguousarray(value).tobytes())


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Tensors of a safetensors file. Raises ConfigError when it is missing."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the tensors in {path}: {error.strerror or error}") from error
    start = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8:start]).items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            flat = np.frombuffer(data[start + first : start + last], dtype=_DTYPES[entry["dtype"]])
            tensors[name] = flat.reshape(entry["shape"]).copy()
    return tensors


def check_names(where: str, tensors: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ConfigError that lists every missing and unexpected tensor, and every one of another shape."""
    problems = [f"missing: {name}" for name in shapes if name not in tensors]
    problems += [f"unexpected: {name}" for name in tensors if name not in shapes]
    problems += [
        f"{name} has shape {tensors[name].shape}, not {shape}"
        for name, shape in shapes.items()
        if name in tensors and tensors[name].shape != shape
    ]
    if problems:
        raise ConfigError(f"{where} does not hold what the toy model needs", *problems)


def write_model(folder: Path, params: Params) -> None:
    """`model.safetensors` and a `config.json` that names the architecture."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"architectures": ["ToyPolicy"], "vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN, "window": WINDOW}
    (folder / "config.json").write_text(json.dumps(config, indent=1), "utf-8")
    write_tensors(folder / "model.safetensors", params)


def read_model(folder: Path) -> Params:
    """The parameters in `folder`. Raises ConfigError that lists what is missing, unexpected, or of another shape."""
    params = read_tensors(folder / "model.safetensors")
    check_names(str(folder), params, SHAPES)
    return params
