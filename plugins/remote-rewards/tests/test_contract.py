"""The contract suite of rewards, against servers on this machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import miles_remote_rewards
from miles_core.testing.contracts import RewardContract

sys.path.insert(0, str(Path(__file__).parent))
from servers import Server

JUDGE, HTTP = miles_remote_rewards.miles_rewards()


def right(text: str) -> bool:
    return "It is 4." in text


def as_judge(handler, body):
    verdict = f"VERDICT: {10 if right(body['messages'][-1]['content']) else 0}"
    handler.reply(json.dumps({"choices": [{"message": {"content": verdict}}]}))


def as_service(handler, body):
    handler.reply(json.dumps({"scores": [float(right(row["response"])) for row in body["samples"]]}))


class TestJudge(RewardContract):
    component = JUDGE
    right = "It is 4."
    wrong = "It is 5."

    @pytest.fixture(autouse=True)
    def _server(self):
        with Server(as_judge) as server:
            self.options = {"base_url": server.url, "model": "m", "backoff_s": 0.0}
            yield


class TestHttp(RewardContract):
    component = HTTP
    right = "It is 4."
    wrong = "It is 5."

    @pytest.fixture(autouse=True)
    def _server(self):
        with Server(as_service) as server:
            self.options = {"url": server.url, "batch_size": 2, "backoff_s": 0.0}
            yield
