"""Real Megatron-Core (TP2 x PP2, gloo, 4 processes) and real SGLang servers on the CPU, driven through the core's
interfaces as they are. Everything that agrees here agrees with a plain single-process torch model in fp32.

The servers take about a minute to start, which the trainer's tests use.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HERE = Path(__file__).parent


def missing_runtimes() -> list[str]:
    missing = []
    for name in ("torch", "transformers", "aiohttp", "megatron.core", "sglang"):
        try:
            if importlib.util.find_spec(name) is None:
                missing.append(name)
        except ModuleNotFoundError:
            missing.append(name)
    return missing


if missing_runtimes():
    REASON = f"the contract spike needs {', '.join(missing_runtimes())}, not installed here; see requirements/spike.txt"
    if os.environ.get("MILES_LEG") == "spike":
        raise RuntimeError(REASON)
    pytest.skip(REASON, allow_module_level=True)

sys.path.insert(0, str(HERE))  # its modules are also imported by the workers, under these names

import plain_reference as plain  # noqa: E402
import torch  # noqa: E402
from gloo_transport import GlooTransport  # noqa: E402
from sglang_engine import SglangEngine  # noqa: E402
from spike_support import Loop, make_groups, write_model  # noqa: E402

from miles_core.batch import RolloutBatch, apply_advantages, make_batches, prepare  # noqa: E402
from miles_core.builtin import advantages as builtin  # noqa: E402
from miles_core.engines import EnginePool  # noqa: E402
from miles_core.fields import FieldSpec  # noqa: E402
from miles_core.launch import LocalLauncher  # noqa: E402
from miles_core.settings import TrainTable  # noqa: E402
from miles_core.trainers import TrainerGroup  # noqa: E402
from miles_core.types import (  # noqa: E402
    GenerateRequest,
    Generation,
    RoleSpec,
    SamplingParams,
    StepReport,
    TrainBatch,
    WeightMessage,
)

pytestmark = pytest.mark.timeout(420)
torch.set_num_threads(1)  # the cores belong to the ranks and servers

TRUST = {"name": "trust", "dtype": "float32", "align": "transition"}
LOSSES = ["plugin_losses:sequence_ratio", "plugin_losses:value_error"]
BUCKET_BYTES = 150_000  # the model has 1.1 MB, so a push has several buckets and can be cut in its middle
TRANSFER_LIMIT_S = 20.0


class DoomedEngine(SglangEngine):
    """Its server gets `fate` when bucket 3 is announced: after three have been loaded, before this one has."""

    fate: signal.Signals | None = None

    async def receive(self, message: WeightMessage) -> dict[str, Any]:
        if self.fate is not None and message.kind == "broadcast" and message.bucket == 3:
            self.send_signal(self.fate)
        return await super().receive(message)


@dataclass(slots=True)
class Stack:
    """The real thing. `initial` is a checkpoint of the trainer before any step."""

    loop: Loop
    folder: Path
    trainer: TrainerGroup
    pool: EnginePool
    transport: GlooTransport
    engines: list[DoomedEngine]
    engines_up: Any
    initial: Path
    seconds: dict[str, float] = field(default_factory=dict)

    def run(self, work: Any) -> Any:
        return self.loop.run(work)

    def fresh(self) -> None:
        """The trainer as it was at its start, optimizer included."""
        self.run(self.trainer.load(self.initial))

    def exported(self, name: str) -> torch.nn.Module:
        """The policy as plain transformers loads it from the trainer's export."""
        folder = self.folder / name
        folder.mkdir()
        self.run(self.trainer.save_model(folder))
        return plain.load(folder)

    def serving(self) -> None:
        """Waits for the servers."""
        began = time.monotonic()
        self.engines_up.result(300)
        self.seconds.setdefault("waited for servers", time.monotonic() - began)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("spike")
    policy, critic = write_model(folder / "policy"), write_model(folder / "critic", critic=True, seed=1)
    loop = Loop()
    engines = [DoomedEngine(f"engine-{i}", policy, folder / f"engine-{i}.log") for i in range(2)]
    pool = EnginePool(engines, timeout_s=60.0, sync_timeout_s=60.0)
    engines_up = asyncio.run_coroutine_threadsafe(pool.start(), loop.loop)
    launcher = LocalLauncher(run_dir=folder)
    spec = RoleSpec(
        name="trainer",
        component="megatron",
        num_workers=4,
        env={
            "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep),
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        },
    )
    options = {"tp": 2, "pp": 2, "losses": LOSSES, "fields": [TRUST], "critic": str(critic)}
    allocation = None
    seconds: dict[str, float] = {}
    try:
        began = time.monotonic()
        allocation = loop.run(launcher.allocate([spec]))
        payload = {"kind": "trainer", "factory": "megatron_rank:build", "model_path": str(policy), "args": options}
        trainer = TrainerGroup(loop.run(allocation.launch("trainer", payload)), timeout_s=240.0)
        loop.run(trainer.start())
        seconds["trainer up"] = time.monotonic() - began
        (folder / "initial").mkdir()
        loop.run(trainer.save(folder / "initial"))
        transport = GlooTransport(bucket_bytes=BUCKET_BYTES, timeout_s=TRANSFER_LIMIT_S)
        loop.run(transport.connect(trainer, pool))
        yield Stack(loop, folder, trainer, pool, transport, engines, engines_up, folder / "initial", seconds)
        print("\nspike, seconds:", {name: round(value, 2) for name, value in seconds.items()})
    finally:
        engines_up.cancel()
        with contextlib.suppress(Exception):
            loop.run(pool.close(), 60)
        for engine in engines:
            if engine.process is not None:
                engine.send_signal(signal.SIGKILL)
        if allocation is not None:
            loop.run(allocation.close(), 60)
        loop.close()


# --- Trainer ---------------------------------------------------------------------------------------------------------


def rollout_batch(stack: Stack, seed: int) -> RolloutBatch:
    """Groups with the side channel checked, and old log-probabilities from the trainer."""
    batch = prepare(make_groups(seed), fields=[FieldSpec(**TRUST)])
    whole = TrainBatch(samples=batch.samples, mask=batch.mask)
    batch.put(
        "old_logprobs", stack.run(stack.trainer.forward(whole, "policy", frozenset({"logprobs"})))["logprobs"], "test"
    )
    return batch


def train(stack: Stack, batch: RolloutBatch) -> tuple[list[TrainBatch], list[StepReport]]:
    grpo = builtin.COMPONENTS["miles_advantages"][0]
    apply_advantages(batch, [("grpo", grpo.build(grpo.config(), None))])
    steps = make_batches(
        batch, TrainTable(minibatches=2), needs=frozenset({"logprobs", "old_logprobs"}), scopes=("policy",)
    )
    return steps, [stack.run(stack.trainer.step(step)) for step in steps]


def test_ranks_form_a_grid_with_one_that_speaks_for_it(stack: Stack) -> None:
    places = [(info.dp_rank, info.dp_size, info.output) for info in stack.trainer.ranks]
    # PP2 x TP2: ranks 2 and 3 are the last stage, and of those the first tensor rank has the results
    assert places == [(0, 1, False), (0, 1, False), (0, 1, True), (0, 1, False)]


def test_two_minibatches_of_a_sequence_level_plugin_loss_equal_plain_torch(stack: Stack) -> None:
    stack.fresh()
    batch = rollout_batch(stack, seed=0)
    model = plain.load(stack.folder / "policy")
    with torch.no_grad():
        old = [plain.logprobs(model, s.tokens, s.temperature) for s in batch.samples]
    for row, mask, want in zip(batch.columns["old_logprobs"], batch.mask, old, strict=True):
        np.testing.assert_allclose(row[mask], want.numpy()[mask], atol=1e-4)

    began = time.monotonic()
    steps, reports = train(stack, batch)
    stack.seconds["two steps"] = time.monotonic() - began
    assert len(steps) == 2
    assert len(steps[0].samples) == len(steps[1].samples) == 8  # 4 groups of 4, split by group

    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.0)
    place = {s.trajectory_id: i for i, s in enumerate(batch.samples)}
    for step, report in zip(steps, reports, strict=True):
        chosen = [place[s.trajectory_id] for s in step.samples]
        advantages = [float(batch.columns["advantages"][i][batch.mask[i]][0]) for i in chosen]
        loss, norm = plain.sequence_ratio_step(model, adam, step.samples, [old[i] for i in chosen], advantages, clip=0.2)
        assert report.loss == pytest.approx(loss, abs=1e-4)
        assert report.grad_norm == pytest.approx(norm, abs=1e-4)
        assert report.trainable == step.num_trainable
        assert report.metrics["loss/sequence-ratio/clipped"][1] == step.num_trainable  # once, not once per rank
    # several microbatches took part: no sample is longer than 18 tokens, and one microbatch holds at most 64
    assert sum(s.num_tokens for s in steps[0].samples) > 64

    after = dict(stack.exported("after-two-steps").named_parameters())
    moved = 0.0
    for name, want in plain.load(stack.folder / "policy").named_parameters():
        moved = max(moved, (after[name] - want).abs().max().item())
    assert moved > 1e-3  # two steps of Adam at lr 1e-3 move some weight by nearly 2e-3, so 1e-4 below says something
    for name, want in model.named_parameters():
        torch.testing.assert_close(after[name], want, atol=1e-4, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


def test_side_channel_reaches_the_loss_at_its_own_tokens(stack: Stack) -> None:
    """The loss is linear in "trust"; rows are trusted only at one place of one sample, so that any shift would give 0 or
    another sample's number."""
    stack.fresh()
    batch = prepare(make_groups(3), fields=[FieldSpec(**TRUST)])
    chosen = 5
    at = int(np.flatnonzero(batch.mask[chosen])[1])
    for i, sample in enumerate(batch.samples):
        sample.extras["trust"] = np.zeros(sample.num_tokens - 1, np.float32)
        if i == chosen:
            sample.extras["trust"][at] = 1.0
    batch.put("old_logprobs", [np.zeros(s.num_tokens) for s in batch.samples], "test")
    batch.columns["advantages"] = [m.astype(np.float32) for m in batch.mask]
    (step,) = make_batches(batch, TrainTable(), needs=frozenset({"old_logprobs"}), scopes=("policy",))
    report = stack.run(stack.trainer.step(step))
    sample, mask = batch.samples[chosen], batch.mask[chosen]
    model = plain.load(stack.folder / "policy")
    with torch.no_grad():
        ratio = plain.logprobs(model, sample.tokens, sample.temperature).numpy()[mask].mean()
    # advantage 1 and old log-probabilities 0: -min(s, clip(s)) = -s for s = exp(mean) < 0.8, at one of n tokens
    assert report.loss == pytest.approx(-np.exp(ratio) / step.num_trainable, rel=1e-4)


def test_critic_values_feed_gae_and_critic_steps_equal_plain_torch(stack: Stack) -> None:
    stack.fresh()
    batch = prepare(make_groups(1), fields=[FieldSpec(**TRUST)])
    whole = TrainBatch(samples=batch.samples, mask=batch.mask)
    values = stack.run(stack.trainer.forward(whole, "critic", frozenset({"values"})))["values"]
    batch.put("old_values", values, "trainer")
    gae = next(c for c in builtin.COMPONENTS["miles_advantages"] if c.name == "gae")
    apply_advantages(batch, [("gae", gae.build(gae.config(gamma=0.99, lam=0.9), None))])

    critic = plain.load(stack.folder / "critic", critic=True)
    returns = []
    for i, sample in enumerate(batch.samples):
        row = plain.values(critic, sample.tokens).detach().numpy()
        np.testing.assert_allclose(values[i], row, atol=1e-4)
        advantage = plain.gae(row[batch.mask[i]], sample.reward, gamma=0.99, lam=0.9)
        np.testing.assert_allclose(batch.columns["advantages"][i][batch.mask[i]], advantage, atol=1e-4)
        returns.append(torch.as_tensor(advantage + row[batch.mask[i]], dtype=torch.float32))

    policy = stack.run(stack.trainer.state_hash())
    (step,) = make_batches(batch, TrainTable(), scopes=("value",))
    adam = torch.optim.AdamW(critic.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.0)
    for _ in range(2):  # the second sees what the first did to every weight
        report = stack.run(stack.trainer.step(step, "critic"))
        loss, norm = plain.value_step(critic, adam, batch.samples, returns)
        assert (report.loss, report.grad_norm) == (pytest.approx(loss, abs=1e-4), pytest.approx(norm, abs=1e-4))
    assert stack.run(stack.trainer.state_hash()) == policy  # the policy did not move


def test_checkpoint_continues_exactly_and_nothing_trainable_moves_nothing(stack: Stack) -> None:
    stack.fresh()
    steps, _ = train(stack, rollout_batch(stack, seed=2))
    middle = stack.folder / "middle"
    middle.mkdir()
    stack.run(stack.trainer.save(middle))
    stack.run(stack.trainer.step(steps[0]))
    want = stack.run(stack.trainer.state_hash())
    stack.run(stack.trainer.load(middle))
    assert stack.run(stack.trainer.state_hash()) != want
    empty = steps[1].select(list(range(len(steps[1].samples))))
    empty.mask = [np.zeros_like(mask) for mask in empty.mask]
    assert stack.run(stack.trainer.step(empty)).skipped == "nothing-trainable"
    stack.run(stack.trainer.step(steps[0]))
    assert stack.run(stack.trainer.state_hash()) == want


# --- Engines ---------------------------------------------------------------------------------------------------------

PROBES = [np.arange(3 + i, 19 + i, dtype=np.int32) * 7 % 250 + 3 for i in range(2)]


def probes(stack: Stack) -> list[tuple[np.ndarray, np.ndarray, float]]:
    """Fixed prompts as the trainer scores them, at temperature 1."""
    samples = []
    for template, tokens in zip(make_groups(9)[0].samples, PROBES, strict=False):
        template.tokens, template.temperature = tokens, 1.0
        samples.append(template)
    rows = stack.run(stack.trainer.forward(TrainBatch(samples=samples), "policy", frozenset({"logprobs"})))["logprobs"]
    return [(tokens, row, 1e-3) for tokens, row in zip(PROBES, rows, strict=True)]


def difference(engine: SglangEngine, model: torch.nn.Module, stack: Stack) -> float:
    """Largest difference in nats between what a server and plain transformers say of the fixed prompts."""
    scored = stack.run(engine.score(PROBES))
    with torch.no_grad():
        return max(
            float(np.abs(got["logprobs"] - plain.logprobs(model, tokens).numpy()).max())
            for got, tokens in zip(scored, PROBES, strict=True)
        )


def check_one_version(answer: Generation, prompt: np.ndarray, models: dict[int, torch.nn.Module], heat: float) -> None:
    """Every token's log-probability is that of the weights whose version the answer claims."""
    (span,) = answer.versions
    tokens = np.concatenate([prompt, answer.token_ids])
    with torch.no_grad():
        want = plain.logprobs(models[span.version], tokens, heat).numpy()[len(prompt) :]
    np.testing.assert_allclose(answer.logprobs, want, atol=1e-3, err_msg=f"{answer.id}, version {span.version}")


async def keep_asking(pool: EnginePool, prefix: str, prompts: list[np.ndarray], until: asyncio.Event) -> list[Any]:
    """(prompt, answer) of requests that go on, four at a time, until told to stop."""
    answers = []

    async def client(lane: int) -> None:
        turn = 0
        while not until.is_set():
            prompt = prompts[(lane + turn) % len(prompts)]
            params = SamplingParams(max_new_tokens=12, temperature=0.8, ignore_eos=True)
            request = GenerateRequest(id=f"{prefix}-{lane}-{turn}", token_ids=prompt, params=params, seed=turn)
            answers.append((prompt, await pool.generate(request)))
            turn += 1

    await asyncio.gather(*(client(lane) for lane in range(4)))
    return answers


async def push_under_load(stack: Stack, version: int, prefix: str, checks: Any) -> tuple[Any, list[Any]]:
    stop = asyncio.Event()
    load = asyncio.ensure_future(keep_asking(stack.pool, prefix, PROBES, stop))
    try:
        await asyncio.sleep(0.5)
        report = await stack.pool.sync(stack.transport, version, checks)
        await asyncio.sleep(0.5)
    finally:
        stop.set()
    return report, await load


def test_export_broadcast_and_verified_push_to_two_servers(stack: Stack) -> None:
    stack.fresh()
    old = stack.exported("version-old")
    train(stack, rollout_batch(stack, seed=4))
    new = stack.exported("version-new")
    stack.serving()
    assert max(difference(engine, old, stack) for engine in stack.engines) < 1e-3  # they serve what they loaded
    before, version = stack.pool.version, stack.pool.version + 1
    began = time.monotonic()
    report, answers = stack.run(push_under_load(stack, version, "load", probes(stack)))
    stack.seconds["push to two, under load"] = report.seconds
    stack.seconds["whole sync under load"] = time.monotonic() - began
    assert [(e.engine, e.ok, e.phase) for e in report.engines] == [
        ("engine-0", True, "commit"),
        ("engine-1", True, "commit"),
    ]
    assert report.num_buckets == len(report.hashes) > 4
    assert report.num_bytes == 4 * sum(p.numel() for p in new.parameters())
    assert [(m.state, m.version) for m in stack.pool.members()] == [("ready", version)] * 2
    for engine in stack.engines:
        assert stack.run(engine.health())["version"] == version
        assert difference(engine, new, stack) < 1e-3
        assert difference(engine, old, stack) > 1e-2
    models = {before: old, version: new}
    assert {answer.versions[0].version for _, answer in answers} == set(models)  # asked before and after
    for prompt, answer in answers:
        check_one_version(answer, prompt, models, heat=0.8)

    began = time.monotonic()  # the group of the first push still stands
    again = stack.run(stack.pool.sync(stack.transport, version + 1, probes(stack)))
    stack.seconds["second push, idle"] = time.monotonic() - began
    assert all(e.ok for e in again.engines)


def test_engine_that_hangs_in_the_middle_of_a_push_costs_a_time_limit_and_comes_back(stack: Stack) -> None:
    stack.fresh()
    stack.serving()
    first = stack.pool.version + 1
    old = stack.exported("hang-old")
    assert all(e.ok for e in stack.run(stack.pool.sync(stack.transport, first, probes(stack))).engines)
    train(stack, rollout_batch(stack, seed=6))
    new = stack.exported("hang-new")
    survivor, stuck = stack.engines
    stuck.fate, stuck.control_limit_s, stack.transport.timeout_s = signal.SIGSTOP, 4.0, 4.0
    began = time.monotonic()
    report, answers = stack.run(push_under_load(stack, first + 1, "hang", probes(stack)))
    took = stack.seconds["sync with a hung engine"] = time.monotonic() - began
    # 4 s for the bucket, 4 s for leaving the group, 4 s for the pause of the second attempt, and what the work takes
    assert 12 < took < 22
    assert {e.engine: (e.ok, e.phase) for e in report.engines} == {
        survivor.id: (True, "commit"),
        stuck.id: (False, "pause"),
    }
    assert [m.state for m in stack.pool.members()] == ["ready", "dirty"]
    assert difference(survivor, new, stack) < 1e-3
    for prompt, answer in answers:
        check_one_version(answer, prompt, {first: old, first + 1: new}, heat=0.8)

    stuck.send_signal(signal.SIGCONT)  # it goes on with half of a push that was given up long ago
    stuck.fate, stuck.control_limit_s, stack.transport.timeout_s = None, 30.0, TRANSFER_LIMIT_S
    assert all(e.ok for e in stack.run(stack.pool.sync(stack.transport, first + 2, probes(stack))).engines)
    assert [m.state for m in stack.pool.members()] == ["ready", "ready"]
    assert difference(stuck, new, stack) < 1e-3


def test_engine_killed_in_the_middle_of_a_push(stack: Stack) -> None:
    """Last: one server is gone afterwards."""
    stack.fresh()
    stack.serving()
    first = stack.pool.version + 1
    old = stack.exported("kill-old")
    assert all(e.ok for e in stack.run(stack.pool.sync(stack.transport, first, probes(stack))).engines)
    train(stack, rollout_batch(stack, seed=5))
    new = stack.exported("kill-new")
    survivor, doomed = stack.engines
    doomed.fate, before = signal.SIGKILL, stack.pool.counts["resyncs"]
    began = time.monotonic()
    report, answers = stack.run(push_under_load(stack, first + 1, "kill", probes(stack)))
    stack.seconds["sync with a killed engine"] = time.monotonic() - began
    assert time.monotonic() - began < 2 * TRANSFER_LIMIT_S
    outcome = {e.engine: (e.ok, e.phase) for e in report.engines}
    states = {m.id: (m.state, m.version) for m in stack.pool.members()}
    assert not outcome[doomed.id][0] and states[doomed.id][0] in ("dirty", "dead")
    # the group broke for both; the pool's second attempt formed a new one without the dead
    assert outcome[survivor.id] == (True, "commit") and states[survivor.id] == ("ready", first + 1)
    assert stack.pool.counts["resyncs"] - before == 2
    assert difference(survivor, new, stack) < 1e-3
    models = {first: old, first + 1: new}
    assert {answer.versions[0].version for _, answer in answers} == set(models)
    for prompt, answer in answers:
        check_one_version(answer, prompt, models, heat=0.8)
    # the trainer's ranks are in step with each other still: a further push and pass go through
    assert stack.run(stack.pool.sync(stack.transport, first + 2, probes(stack))).engines[0].ok
