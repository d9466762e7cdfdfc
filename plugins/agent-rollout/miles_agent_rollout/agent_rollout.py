"""The rollout `agent`: each sample is one run of an agent that talks to the gateway under a key of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from miles_agent_rollout import AgentConfig
from miles_agent_rollout.agents import Agent, AgentResult, AgentTask
from miles_agent_rollout.gateway import Gateway
from miles_agent_rollout.groups import NO_TOKENS, GroupRollout, Requests
from miles_agent_rollout.parsers import get_parser
from miles_agent_rollout.session import Session
from miles_agent_rollout.turns import Outcome, make_samples
from miles_core.builtin.rollouts import prompt_tokens
from miles_core.errors import UserError
from miles_core.types import Prompt, RolloutContext, Sample

END_S = 10.0
"""How long an agent that was cancelled may take to end."""


class AgentRollout(GroupRollout):
    """See `AgentConfig` for its options. Aborted trajectories start again: nobody can put an agent back."""

    def __init__(self, config: AgentConfig, agent: Agent, log: logging.Logger) -> None:
        self.config, self.agent, self.log = config, agent, log
        self.parser = get_parser(config.parser)
        self._gateway: Gateway | None = None
        self._room = asyncio.Semaphore(config.max_running)

    async def gateway(self) -> Gateway:
        """The server of this event loop, started on first use."""
        if self._gateway is None or self._gateway.loop is not asyncio.get_running_loop():
            self._room = asyncio.Semaphore(self.config.max_running)
            self._gateway = Gateway(
                max_body_bytes=self.config.max_body_bytes,
                model=self.config.model,
                unsupported=self.config.unsupported,
                log=self.log,
            )
        await self._gateway.start()
        return self._gateway

    async def trajectory(
        self, context: RolloutContext, requests: Requests, index: int, partial: Sequence[Sample]
    ) -> list[Sample]:
        gateway = await self.gateway()
        async with self._room:
            session = Session(requests, index, self.config, self.parser)
            gateway.open(session, self.config.timeout_s)
            try:
                result = await self._run(session, self._task(context, index, gateway, session))
            finally:
                gateway.close_session(session, "its agent has ended")
        if session.fatal is not None:
            raise session.fatal
        outcome = self._outcome(session, result)
        start = _start(context) if not session.turns else NO_TOKENS
        return make_samples(context, index, session.turns, outcome, start, session.sampling.temperature)

    async def _run(self, session: Session, task: AgentTask) -> AgentResult | None:
        """What the agent gave back, or None when its session was over, or its group cancelled, before it ended."""
        if session.requests.cancelled:
            return None
        work = asyncio.ensure_future(self.agent.run(task))
        over = asyncio.ensure_future(session.over.wait())
        cancelled = session.context.cancelled
        watch = asyncio.ensure_future(cancelled.wait()) if cancelled is not None else over
        try:
            await asyncio.wait({work, over, watch}, return_when=asyncio.FIRST_COMPLETED)
            return work.result() if work.done() else None
        finally:
            for task_ in {work, over, watch}:
                task_.cancel()
            await asyncio.wait({work, over, watch}, timeout=END_S)

    def _outcome(self, session: Session, result: AgentResult | None) -> Outcome:
        metadata: dict[str, Any] = {
            "num_turns": len(session.turns),
            "cached_tokens": sum(turn.answer.cached_tokens for turn in session.turns),
            **{name: session.counts[name] for name in ("requests", "refused", "rewrites", "ignored_parameters")},
            "reaped": session.reaped,
        }
        last = session.turns[-1].answer if session.turns else None
        response = session.context.tokenizer.decode(last.token_ids, skip_special=True) if last else ""
        outcome = Outcome(status="stop", response=response, metadata=metadata)
        if session.requests.cancelled:
            outcome.status, outcome.reason = "aborted", "the group was cancelled"
        elif result is None:
            seconds = f"{self.config.timeout_s:g} s"
            outcome.status, outcome.reason = "timeout", f"the agent did not end within {seconds} (rollout.agent.timeout_s)"
        elif last is None:
            why = session.truncated or session.failure or "it made no request"
            said = f"; it said: {result.error}" if result.error else ""
            outcome.status, outcome.reason = "error", f"the agent ended without an answer of the model: {why}{said}"
        elif result.error and session.truncated:
            outcome.status, outcome.reason = "truncated", f"{session.truncated}; then {result.error}"
        elif result.error:
            failure = f"; the engine's last failure: {session.failure}" if session.failure else ""
            outcome.status, outcome.reason = "error", f"the agent failed: {result.error}{failure}"
        elif session.truncated:
            outcome.status, outcome.reason = "truncated", session.truncated
        else:
            outcome.status = last.finish
        if result is not None and not result.error:
            outcome.response = result.response if result.response is not None else response
            metadata |= {"agent_reward": result.reward, "agent": result.metadata}
        return outcome

    def _task(self, context: RolloutContext, index: int, gateway: Gateway, session: Session) -> AgentTask:
        prompt: Prompt = context.prompt
        return AgentTask(
            id=prompt.id,
            draw=prompt.draw,
            index=index,
            base_url=gateway.base_url,
            api_key=session.key,
            model=self.config.model,
            messages=prompt.messages,
            text=prompt.text,
            label=prompt.label,
            tools=list(prompt.tools),
            metadata=dict(prompt.metadata),
            evaluation=context.evaluation,
        )


def _start(context: RolloutContext) -> np.ndarray:
    """The prompt's tokens, to stand for a trajectory without any answer."""
    try:
        return np.asarray(prompt_tokens(context.prompt, context.tokenizer).token_ids, dtype=np.int32)
    except UserError:
        return NO_TOKENS
