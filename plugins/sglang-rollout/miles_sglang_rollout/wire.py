"""Requests and answers as SGLang writes them. R tokens sampled, P prompt tokens. Nothing here waits or opens anything."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from miles_core.errors import EngineFailed
from miles_core.generations import merge_spans
from miles_core.types import GenerateRequest, Generation, Status, VersionSpan

FINISH: dict[str, Status] = {"stop": "stop", "length": "length", "abort": "aborted"}
SPECULATIVE = {
    "spec_accept_rate": "accepted_rate",
    "spec_accept_length": "accepted_length",
    "spec_verify_ct": "verifications",
}
"""Numbers of speculative decoding: SGLang's name -> name in `Generation.extras["speculative"]`."""


@dataclass(slots=True)
class Piece:
    """What one HTTP request gave: a whole answer, or as much as there was when it was cut."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """One per token where it was streamed; else empty."""
    finish: Status = "error"
    reason: str = ""
    cached: int = 0
    prompt_tokens: int = 0
    experts: str = ""
    speculative: dict[str, float] = field(default_factory=dict)


def generate_body(
    request: GenerateRequest, rid: str, tokens: np.ndarray, max_new_tokens: int, *, stream: bool, experts: bool
) -> dict[str, Any]:
    """The body of /generate for the context `tokens`: token ids in, token ids and log-probabilities out."""
    params = request.params
    sampling: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
        "sampling_seed": request.seed & ((1 << 63) - 1),
        "skip_special_tokens": False,
    }
    if params.ignore_eos:
        sampling["stop_token_ids"] = []  # SGLang stops at these in spite of ignore_eos
    if params.stop:
        sampling["stop"] = list(params.stop)
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": np.asarray(tokens).tolist(),
        "sampling_params": sampling,
        "return_logprob": True,
    }
    if stream:
        body["stream"] = True
    if experts:
        body["return_routed_experts"] = True
    if request.images:
        body["image_data"] = [image_of(image) for image in request.images]
    return body


def image_of(image: Any) -> str:
    """An image as SGLang takes it: a URL, a path or a data URI as it is; bytes, and PIL images as PNG, as a data URI."""
    if isinstance(image, str):
        return image
    if hasattr(image, "save"):
        import io

        stream = io.BytesIO()
        image.save(stream, format="PNG")
        image = stream.getvalue()
    if isinstance(image, bytes | bytearray):
        return "data:image/png;base64," + base64.b64encode(image).decode()
    raise EngineFailed(f"an image of type {type(image).__name__} cannot be sent; give a URL, a path, bytes or a PIL image")


def score_body(rid: str, tokens: np.ndarray, topk: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": np.asarray(tokens).tolist(),
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    if topk:
        body["top_logprobs_num"] = topk
    return body


def add(piece: Piece, answer: dict[str, Any], version_of: Callable[[str], int] | None, *, fresh: bool) -> None:
    """Adds an answer (all of it, or a chunk of a stream) to `piece`. `version_of` reads the server's name of a version,
    for streams alone; `fresh` says whether a chunk holds only what is new. Raises EngineFailed for an error."""
    if "error" in answer:
        error = answer["error"]
        raise EngineFailed(f"the server refused it: {error.get('message', error) if isinstance(error, dict) else error}")
    meta = answer["meta_info"]
    pairs = meta.get("output_token_logprobs") or []
    if not fresh:
        pairs = pairs[len(piece.tokens) :]
    piece.tokens += [entry[1] for entry in pairs]
    piece.logprobs += [entry[0] for entry in pairs]
    if version_of is not None:
        piece.versions += [version_of(str(meta.get("weight_version", "")))] * len(pairs)
    piece.cached = meta.get("cached_tokens", piece.cached) or 0
    piece.prompt_tokens = meta.get("prompt_tokens", piece.prompt_tokens)
    piece.experts = meta.get("routed_experts") or piece.experts
    piece.speculative = {ours: meta[name] for name, ours in SPECULATIVE.items() if name in meta} or piece.speculative
    reason = meta.get("finish_reason")
    if reason:
        piece.finish = FINISH.get(reason.get("type", ""), "error")
        piece.reason = reason.get("message") or ("" if piece.finish != "error" else f"unknown end {reason}")


class Events:
    """Server-sent events from bytes in pieces of any size: JSON objects, until the one that says that it is over."""

    def __init__(self) -> None:
        self._rest = b""
        self.done = False

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        *whole, self._rest = (self._rest + data).split(b"\n\n")
        for event in whole:
            text = event.removeprefix(b"data: ").strip()
            if text == b"[DONE]":
                self.done = True
            elif text:
                yield json.loads(text)


@dataclass(slots=True)
class Parts:
    """An answer on its way, of one piece or, after pauses, of several: each went on where the last one stopped."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    cached: int = 0
    experts: list[np.ndarray] = field(default_factory=list)
    speculative: dict[str, float] = field(default_factory=dict)
    pieces: int = 0

    def take(self, piece: Piece, version: int) -> None:
        """`version` is that of a piece that was not streamed."""
        start = len(self.tokens)
        for i, own in enumerate(piece.versions or [version] * len(piece.tokens)):
            self.spans.append(VersionSpan(start=start + i, stop=start + i + 1, version=own))
        self.spans = list(merge_spans(self.spans))
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        if not self.pieces:
            self.cached = piece.cached
        self.speculative = piece.speculative or self.speculative
        self.pieces += 1

    def take_experts(self, rows: np.ndarray) -> None:
        """`rows` of the whole context so far; those of tokens that an earlier piece computed stay as they were."""
        known = sum(len(part) for part in self.experts)
        self.experts.append(rows[known:])

    def generation(self, request_id: str, finish: Status, reason: str, incarnation: str) -> Generation:
        extras: dict[str, Any] = {}
        if self.experts:
            extras["routed_experts"] = np.concatenate(self.experts)
        if self.speculative:
            extras["speculative"] = self.speculative
        return Generation(
            id=request_id,
            token_ids=np.array(self.tokens, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            finish=finish,
            versions=tuple(self.spans),
            incarnation=incarnation,
            cached_tokens=self.cached,
            extras=extras,
            reason=reason,
        )


def read_experts(text: str, num_tokens: int, topk: int) -> np.ndarray:
    """int16[T - 1, layers, topk] from base64 of int32, for a context of `num_tokens` (prompt and answer). Raises
    EngineFailed when there is none, when the rows do not fit the tokens, and when every entry is 0: no router chooses one
    expert twice."""
    raw = np.frombuffer(base64.b64decode(text), np.int32) if text else np.zeros(0, np.int32)
    rows = num_tokens - 1
    if not len(raw) or rows < 1 or len(raw) % (rows * topk):
        raise EngineFailed(
            f"routed experts: {len(raw)} numbers came for {num_tokens} tokens: {max(rows, 0)} rows of layers x {topk}"
        )
    if not raw.any() and topk > 1:
        raise EngineFailed("routed experts: every token of every layer went to expert 0 only, which no router does")
    return raw.reshape(rows, -1, topk).astype(np.int16)


def read_scores(meta: dict[str, Any], num_tokens: int, topk: int) -> dict[str, np.ndarray]:
    """`EngineReplica.score` of one sequence."""
    entries = meta["input_token_logprobs"]
    if len(entries) != num_tokens:
        raise EngineFailed(f"scoring {num_tokens} tokens gave {len(entries)} log-probabilities")
    row = {"logprobs": np.array([entry[0] or 0.0 for entry in entries], np.float32)}
    row["logprobs"][0] = 0.0
    if topk:
        ids, values = np.zeros((num_tokens, topk), np.int32), np.zeros((num_tokens, topk), np.float32)
        for i, best in enumerate(meta["input_top_logprobs"]):
            for k, entry in enumerate(best or []):
                values[i, k], ids[i, k] = entry[0], entry[1]
        row |= {"topk_ids": ids, "topk_logprobs": values}
    return row
