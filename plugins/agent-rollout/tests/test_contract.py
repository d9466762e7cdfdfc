"""The contract suites of everything that this plugin registers."""

from __future__ import annotations

from pathlib import Path

import miles_agent_rollout
from miles_core.testing.contracts import MetricContract, RewardContract, RolloutContract
from miles_core.testing.toy import ToyTokenizer

HERE = Path(__file__).parent
TOOLS, AGENT = miles_agent_rollout.miles_rollouts()
(REPORTED,) = miles_agent_rollout.miles_rewards()
(TURNS,) = miles_agent_rollout.miles_metrics()


class WithoutSchemas(ToyTokenizer):
    """Shows no tools: their schemas, one token per character, are longer than the suite's contexts."""

    def render(self, messages, tools=(), images=()):
        return super().render(messages, (), images)


class TestTools(RolloutContract):
    component = TOOLS
    options = {"tools": (f"{HERE}/agent_demo_tools.py:add",)}

    def tokenizer(self):
        return WithoutSchemas()


class TestToolsThatCall(TestTools):
    """Every answer is taken for a call of a tool."""

    options = {**TestTools.options, "parser": f"{HERE}/agent_demo_tools.py:always", "max_turns": 3}
    max_context = 400
    resumes = False  # the rule wants one request for the rest of a group; here every trajectory goes on for three turns


class TestAgent(RolloutContract):
    component = AGENT
    options = {"agent": f"{HERE}/agent_demo_agents.py:two_questions"}
    resumes = False


class TestReported(RewardContract):
    component = REPORTED

    def sample(self, response, index=0):
        sample = super().sample(response, index)
        sample.metadata["agent_reward"] = float(response == self.right)
        return sample


class TestTurns(MetricContract):
    component = TURNS
