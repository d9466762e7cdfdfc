"""Agents of the tests, on nothing but the standard library."""

from __future__ import annotations

import json
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
