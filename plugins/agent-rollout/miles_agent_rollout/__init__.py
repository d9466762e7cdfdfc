"""Multi-turn rollouts: a model that calls Python tools, and agents that speak OpenAI's API to a gateway."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from miles_core import BuildContext, Component, ComponentConfig, Environment, hookimpl

HISTORY = Literal["segment", "append"]


class ToolsConfig(ComponentConfig):
    """Options of the rollout `tools`."""

    tools: tuple[str, ...] = Field(min_length=1)
    """The tools: "module:function", "path/file.py:function", or names registered with `@miles_agent_rollout.tool`."""
    parser: str = "hermes"
    """How calls stand in an answer: "hermes" (JSON in <tool_call> tags), "python" (a call, or a list of calls), or
    "module:function" that takes the text and returns a `Parsed`."""
    max_turns: int = Field(default=8, gt=0)
    """Most answers of a trajectory; one that would go on is truncated."""
    max_tokens: int = Field(default=0, ge=0)
    """Most tokens sampled in a trajectory, over all turns; 0 leaves it to max_turns and the context."""
    tool_timeout_s: float = Field(default=30.0, gt=0)
    """Time limit of a tool call; the model is told of a late one."""
    max_result_chars: int = Field(default=16000, gt=0)
    """Longer results of a tool are cut in the middle."""
    history: HISTORY = "segment"
    """When the chat template would rewrite earlier turns: open a new training segment, or append to what was sampled."""
    isolate_tools: bool = False
    """Run tools in processes that are killed when they are late, rather than in threads, which cannot be."""
    workers: int = Field(default=2, gt=0)
    """Processes of isolated tools."""


class AgentConfig(ComponentConfig):
    """Options of the rollout `agent`."""

    agent: str = ""
    """The agent as a function of an `AgentTask`, plain or async: "module:function" or "path/file.py:function"."""
    command: tuple[str, ...] = ()
    """The agent as a program and its arguments; "{prompt}", "{base_url}", "{api_key}" and "{model}" are filled in."""
    mode: Literal["thread", "process"] = "thread"
    """Where a function runs: in a thread of this process, or in a process that can be killed."""
    env: tuple[str, ...] = ()
    """Environment variables that look like secrets and that the agent's process may see all the same."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Time limit of one trajectory; then its session is closed, and the agent is ended."""
    max_running: int = Field(default=64, gt=0)
    """Agents that run at the same time."""
    max_turns: int = Field(default=64, gt=0)
    """Most requests that a session may make; further ones are refused, and the trajectory is truncated."""
    max_tokens: int = Field(default=0, ge=0)
    """Most tokens sampled in a trajectory, over all requests; 0 leaves it to max_turns and the context."""
    max_body_bytes: int = Field(default=16 << 20, gt=0)
    """Larger requests are refused."""
    parser: str = "hermes"
    """How tool calls stand in an answer; see the rollout `tools`."""
    model: str = "policy"
    """Name of the model in answers and in /v1/models; requests may use any name."""
    history: HISTORY = "segment"
    """When the chat template would rewrite earlier turns, though the agent did not: open a new training segment, or append
    to what was sampled."""
    unsupported: Literal["refuse", "ignore"] = "refuse"
    """What a request gets that asks for what cannot be done, such as another temperature than the run's: an error, or the
    run's own way, counted in the sample's metadata."""


def _build_tools(config: ToolsConfig, context: BuildContext) -> Any:
    from miles_agent_rollout.isolate import Workers
    from miles_agent_rollout.tools import Toolbox, load_tools
    from miles_agent_rollout.tools_rollout import ToolsRollout

    workers = Workers(config.workers, context.run_dir / "logs" / "tools.log") if config.isolate_tools else None
    limits = {"timeout_s": config.tool_timeout_s, "max_chars": config.max_result_chars}
    return ToolsRollout(config, Toolbox(load_tools(config.tools), workers=workers, **limits))


def _check_tools(config: ToolsConfig, environment: Environment) -> None:
    from miles_agent_rollout.parsers import get_parser
    from miles_agent_rollout.tools import load_tools

    load_tools(config.tools)
    get_parser(config.parser)


def _build_agent(config: AgentConfig, context: BuildContext) -> Any:
    from miles_agent_rollout.agent_rollout import AgentRollout
    from miles_agent_rollout.agents import make_agent

    agent = make_agent(config.agent, config.command, config.mode, context.run_dir / "logs", config.env)
    return AgentRollout(config, agent, context.logger)


def _check_agent(config: AgentConfig, environment: Environment) -> None:
    import aiohttp

    from miles_agent_rollout.agents import make_agent
    from miles_agent_rollout.parsers import get_parser

    folder = environment.run_dir
    make_agent(config.agent, config.command, config.mode, folder, config.env)  # type: ignore[arg-type]
    get_parser(config.parser)


def _build_reward(config: Any, context: BuildContext) -> Any:
    from miles_agent_rollout.judging import ReportedReward

    return ReportedReward()


def _build_metric(config: Any, context: BuildContext) -> Any:
    from miles_agent_rollout.judging import turn_metrics

    return turn_metrics


def __getattr__(name: str) -> Any:
    """`tool` and `ToolContext` for plugin files, `AgentTask` for agents: imported on first use."""
    if name in ("tool", "ToolContext"):
        from miles_agent_rollout import tools

        return getattr(tools, name)
    if name == "AgentTask":
        from miles_agent_rollout.agents import AgentTask

        return AgentTask
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@hookimpl
def miles_rollouts() -> list[Component[Any]]:
    return [
        Component(
            name="tools",
            summary="The model calls Python tools, turn by turn; what tools say is not trained.",
            config=ToolsConfig,
            build=_build_tools,
            check=_check_tools,
        ),
        Component(
            name="agent",
            summary="An agent of any kind talks to the model through an OpenAI-compatible gateway.",
            config=AgentConfig,
            build=_build_agent,
            check=_check_agent,
        ),
    ]


@hookimpl
def miles_rewards() -> list[Component[Any]]:
    return [Component(name="agent-reported", summary="The reward that the agent itself gave back.", build=_build_reward)]


@hookimpl
def miles_metrics() -> list[Component[Any]]:
    return [Component(name="turns", summary="Turns, segments, tool calls and their failures.", build=_build_metric)]
