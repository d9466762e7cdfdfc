"""`python -m miles_agent_rollout.child PARENT`: carries out calls, one JSON line each, in this process.

{"reference": ..., "kwargs": {...}} calls a tool and answers its result as text; {"reference": ..., "task": {...}} runs an
agent. What the called code prints goes to the log.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import os
import sys
import traceback
from typing import Any

from miles_agent_rollout.agents import AgentTask, result_row
from miles_agent_rollout.isolate import as_text
from miles_agent_rollout.references import load
from miles_agent_rollout.tools import Tool
from miles_core.reaping import become_subreaper, die_with_parent


def answer(request: dict[str, Any]) -> Any:
    if "ready" in request:
        return True
    if "task" in request:
        return result_row(finished(load(request["reference"], "agent")(AgentTask(**request["task"]))))
    made = tool_of(request["reference"])
    return as_text(finished(made.function(**made.checked(request["kwargs"]))))


@functools.cache
def tool_of(reference: str) -> Tool:
    return Tool.of(load(reference, "tool"))


def finished(result: Any) -> Any:
    return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Any) -> Any:
    return await result


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    become_subreaper()
    requests, answers = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    for line in requests:
        try:
            row = {"ok": answer(json.loads(line))}
            text = json.dumps(row)
        except BaseException as error:
            traceback.print_exc()
            text = json.dumps({"error": f"{type(error).__name__}: {error}"})
        answers.write(text + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
