"""Agents of the tests, on nothing but the standard library."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request


def post(task, body, path="/chat/completions", key=None):
    """(status, parsed body) of one request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key or task.api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(task.base_url + path, data, headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def ask(task, messages, **more):
    status, body = post(task, {"model": "policy", "messages": messages, **more})
    if status != 200:
        raise RuntimeError(f"{status}: {body['error']['message']}")
    return body["choices"][0]["message"]


def two_questions(task):
    """Asks the prompt, and then once more."""
    messages = list(task.messages)
    messages.append(ask(task, messages))
    messages.append({"role": "user", "content": "2"})
    return ask(task, messages)["content"]


def environment(task):
    """What a process sees; asks by the environment alone."""
    task.base_url, task.api_key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    ask(task, [{"role": "user", "content": task.prompt}])
    names = ("MILES_TEST_SECRET_TOKEN", "MILES_TEST_PLAIN", "MILES_TEST_API_KEY")
    return {"reward": 0.5, "metadata": {"pid": os.getpid(), "env": {n: os.environ.get(n) for n in names}}}


async def patient(task):
    """A coroutine that asks in a thread of its own."""
    reply = await asyncio.to_thread(ask, task, task.messages)
    return reply["content"] + "!"


def with_child(task):
    """Starts a process that outlives everything, tells its id, and hangs."""
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    with open(task.metadata["pid_file"], "w") as file:
        file.write(str(child.pid))
    time.sleep(1000)


def dies(task):
    ask(task, task.messages)
    print("my last words", file=sys.stderr, flush=True)
    os._exit(9)
