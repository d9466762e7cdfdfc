"""The reward `judge`: a language model's verdict."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles_core import BuildContext, Prompt
from miles_core.answers import before_end
from miles_core.types import Sample, Score
from miles_remote_rewards import JudgeConfig
from miles_remote_rewards.client import Client


class JudgeReward:
    """(n - low) / (high - low) for the number n in the judge's last line; no verdict, with the reason, where there is none.
    Part: `raw`, n itself. Metrics: `requests`, `retries`, `cached`, `no_verdict`, `seconds` per request."""

    def __init__(self, config: JudgeConfig, context: BuildContext) -> None:
        self.config, self.context = config, context
        key = context.secrets[config.key] if config.key is not None else ""
        self.client = Client(f"{config.base_url.rstrip('/')}/chat/completions", config, context, key)
        folder = Path(config.cache_dir) if config.cache_dir else context.run_dir / "judge-cache"
        self.cache = Cache(folder) if config.cache else None
        self._pattern = re.compile(config.pattern)

    async def score(self, sample: Sample) -> Score:
        """Raises ServerRefused when the server refuses the request (a wrong key, model or option), and NoAnswer after all
        tries: the sample has no verdict then, it is counted as an error, and a run in which all fail so stops."""
        request = self.request(sample)
        question = json.dumps([self.client.url, request], sort_keys=True)
        name = hashlib.sha256(question.encode("utf-8", "surrogatepass")).hexdigest()
        reply = self.cache.get(name) if self.cache is not None else None
        self.context.metric("cached", float(reply is not None))
        if reply is None:
            reply = self.client.mask(await self.client.post(request, content))
        verdict = self.verdict(reply)
        if isinstance(verdict, str):
            return self._none(verdict)
        if self.cache is not None:  # what holds a verdict; the rest may be asked again
            self.cache.put(name, reply)
        value = (verdict - self.config.low) / (self.config.high - self.config.low)
        return Score(value=value, parts={"raw": verdict})

    def request(self, sample: Sample) -> dict[str, Any]:
        config, prompt = self.config, sample.prompt or Prompt(id="")
        task, response = text_of(prompt), before_end(sample.response)
        label = "" if prompt.label is None else prompt.label
        label = label if isinstance(label, str) else json.dumps(label, ensure_ascii=False, default=str)
        seen = "\0".join((task, label, response)).encode("utf-8", "surrogatepass")
        found = {"prompt": task, "response": response, "label": label, "fence": hashlib.sha256(seen).hexdigest()[:12]}
        found |= {"low": f"{config.low:g}", "high": f"{config.high:g}"}
        user = re.sub(r"\{(\w+)\}", lambda place: found[place[1]], config.template)
        system = [{"role": "system", "content": config.system}] if config.system else []
        request: dict[str, Any] = {"model": config.model, "messages": [*system, {"role": "user", "content": user}]}
        numbers = {"temperature": config.temperature, "max_tokens": config.max_tokens}
        request |= {name: value for name, value in numbers.items() if name not in config.omit}
        return request | config.body

    def verdict(self, reply: str) -> float | str:
        """The number in the last line, or why there is none."""
        lines = [line.strip() for line in reply.splitlines() if line.strip()]
        match = self._pattern.fullmatch(lines[-1]) if lines else None
        if match is None:
            last = f": it ends with {lines[-1][-100:]!r}" if lines else ": it is empty"
            return f"no verdict in the judge's reply{last}"
        try:
            number = float(match[1])
        except (TypeError, ValueError):
            return f"the judge's verdict {match[1]!r:.40} is no number"
        if not math.isfinite(number) or not self.config.low <= number <= self.config.high:
            return f"the judge's verdict {number:g} is not between {self.config.low:g} and {self.config.high:g}"
        return number

    def _none(self, reason: str) -> Score:
        self.context.metric("no_verdict", 1.0, "sum")
        return Score(value=None, reason=reason)


class Cache:
    """One file per reply. Written whole or not at all, so that several workers and runs may share a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _file(self, name: str) -> Path:
        return self.folder / name[:2] / f"{name}.json"

    def get(self, name: str) -> str | None:
        try:
            found = json.loads(self._file(name).read_text("utf-8"))["reply"]
        except (OSError, ValueError, KeyError, TypeError):  # not there, or not ours: it is asked again and written anew
            return None
        return found if isinstance(found, str) else None

    def put(self, name: str, reply: str) -> None:
        file = self._file(name)
        if file.exists():
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=file.parent, prefix=".partial-")
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            json.dump({"reply": reply}, out)
        os.replace(partial, file)


def content(answer: Any) -> str:
    """The text of a chat completion. Raises ValueError where it is none."""
    try:
        text = answer["choices"][0]["message"]["content"]
    except (TypeError, KeyError, IndexError):
        raise ValueError(f"no choices[0].message.content in {json.dumps(answer)[:200]}") from None
    if not isinstance(text, str):
        raise ValueError(f"choices[0].message.content is {text!r:.60}")
    return text


def text_of(prompt: Prompt) -> str:
    """What the policy was asked, for people and judges."""
    if prompt.messages is None:
        return prompt.text or ""
    if len(prompt.messages) == 1:
        return _said(prompt.messages[0])
    return "\n\n".join(f"[{message.get('role', '?')}]\n{_said(message)}" for message in prompt.messages)


def _said(message: Mapping[str, Any]) -> str:
    said = message.get("content") or ""
    if isinstance(said, str):
        return said
    return "\n".join(str(part.get("text", "")) for part in said if isinstance(part, Mapping))
