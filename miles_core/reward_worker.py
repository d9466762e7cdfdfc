"""A process that scores samples: `python -m miles_core.reward_worker FD PARENT`, started by `miles_core.reward_pool`.

It receives names, config and the plugin list, builds its own rewards, and answers on the socket FD in lines of JSON:

    ["building", name]   ["ready", [[name, function, grouped, asynchronous], ...]]   ["failed", class, message, traceback]
    ["s", index, time]   scoring of a sample starts (index -1: of the whole group); the parent's clock runs from here
    ["d", index, outcome]   ["g", [outcome, ...]]   ["x", message]: wrong number of scores   ["e", metrics]: job done
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from miles_core.errors import ContractError
from miles_core.judging import Judge, judge_group, judge_overlapped, judge_sample
from miles_core.reaping import become_subreaper, die_with_parent
from miles_core.reward_wire import decode_group, read_frame

Build = Callable[[dict[str, Any]], tuple[Any, Any]]
"""A row of `setup["rewards"]` -> (reward, its context)."""


class Replies:
    """Lines to the parent. Results wait for the next start or the end of the job, which halves the number of sends."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lines: list[str] = []

    def add(self, *row: Any) -> None:
        self._lines.append(json.dumps(row, allow_nan=False))

    def flush(self) -> None:
        if self._lines:
            self._sock.sendall(("\n".join(self._lines) + "\n").encode())
            self._lines.clear()

    def send(self, *row: Any) -> None:
        self.add(*row)
        self.flush()


def main(fd: int, parent: int) -> None:
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    die_with_parent(parent)
    become_subreaper()
    replies = Replies(sock)
    frame = read_frame(sock)
    if frame is None:
        return
    try:
        judges = build_judges(frame[0], replies)
    except BaseException as error:
        replies.send("failed", type(error).__name__, str(error), traceback.format_exc())
        return
    replies.send("ready", [[j.name, j.function, j.grouped, j.asynchronous] for j in judges.values()])
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    while (frame := read_frame(sock)) is not None:
        job, body = frame
        judge = judges[job["reward"]]
        try:
            run_job(judge, job, body, replies, loop)
        except ContractError as error:
            replies.add("x", str(error))
        replies.send("e", _metrics(judge))


def run_job(judge: Judge, job: dict[str, Any], body: bytes, replies: Replies, loop: asyncio.AbstractEventLoop) -> None:
    """Scores `job["indices"]` of the group in `body`, announcing each sample before it is scored."""
    group = decode_group(body)
    if judge.grouped:
        group.samples = [group.samples[i] for i in job["indices"]]
        replies.send("s", -1, time.monotonic())
        replies.add("g", [outcome.to_json() for outcome in judge_group(judge, group, loop)])
    elif judge.asynchronous:
        for index in job["indices"]:
            replies.add("s", index, time.monotonic())
        replies.flush()
        samples = {index: group.samples[index] for index in job["indices"]}
        settle = judge_overlapped(
            judge, samples, job["limit_s"], lambda i, outcome: replies.send("d", i, outcome.to_json())
        )
        loop.run_until_complete(settle)
    else:
        for index in job["indices"]:
            replies.send("s", index, time.monotonic())
            replies.add("d", index, judge_sample(judge, group.samples[index], loop).to_json())


def build_judges(setup: dict[str, Any], replies: Replies) -> dict[str, Judge]:
    """Builds the rewards that `setup["rewards"]` names: from the run's payload, or from modules and files in tests."""
    build = _builder_of_run(setup) if setup["payload"] is not None else _builder_of_modules(setup)
    judges = {}
    for row in setup["rewards"]:
        replies.send("building", row["name"])
        reward, context = build(row)
        judges[row["name"]] = Judge.of(row["name"], reward, context)
    return judges


def _builder_of_run(setup: dict[str, Any]) -> Build:
    from miles_core.config import ResolvedRun
    from miles_core.wiring import Wiring, explained

    run = ResolvedRun.from_payload(setup["payload"], kinds=("reward", "tokenizer"))
    model_path = Path(setup["model_path"]) if setup["model_path"] else None
    run_dir = Path(setup["run_dir"])
    wiring = Wiring(run, run_dir=run_dir, model_path=model_path, role="reward", index=setup["index"])
    selections = run.all("reward")

    def build(row: dict[str, Any]) -> tuple[Any, Any]:
        selection = selections[row["position"]]
        context = wiring.context(selection)
        try:
            return selection.component.build(selection.options, context), context
        except Exception as error:
            raise explained(error, selection, "building") from error

    return build


def _builder_of_modules(setup: dict[str, Any]) -> Build:
    from miles_core.component import BuildContext

    components = {c.name: c for module in _modules(setup) for c in module.miles_rewards()}

    def build(row: dict[str, Any]) -> tuple[Any, Any]:
        component = components[row["component"]]
        context = BuildContext(
            component=f"reward/{component.name}",
            run_dir=Path(setup["run_dir"]),
            seed=setup["seed"],
            run_config=None,
            role="reward",
            index=setup["index"],
            secrets={name: os.environ[name] for name in component.secrets if name in os.environ},
        )
        return component.build(component.config.model_validate_json(row["options"]), context), context

    return build


def _modules(setup: dict[str, Any]) -> list[Any]:
    loaded = [import_module(name) for name in setup.get("modules", ())]
    for path in setup.get("files", ()):
        spec = spec_from_file_location(Path(path).stem, path)
        assert spec is not None and spec.loader is not None, path
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        loaded.append(module)
    return loaded


def _metrics(judge: Judge) -> dict[str, list[Any]]:
    """What the reward reported through its context since the last job."""
    if judge.context is None or not judge.context.metrics:
        return {}
    taken = {key: list(metric) for key, metric in judge.context.metrics.items()}
    judge.context.metrics.clear()
    return taken


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
