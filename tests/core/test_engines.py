"""EnginePool: routing, requeueing, weight updates, time-outs. All on a virtual clock: 600 s cost nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from miles_core.builtin.rollouts import SingleTurn
from miles_core.engines import EnginePool
from miles_core.errors import ContractError, EngineFailed, RunFailed, WeightSyncFailed, WorkerDied
from miles_core.generations import check_generation, join_generations
from miles_core.testing.clock import run_virtual
from miles_core.testing.engines import Script, StubEngine, StubTransport, stub_logprobs
from miles_core.types import GenerateRequest, Generation, Prompt, PromptTokens, RolloutContext, SamplingParams, VersionSpan


def request(name: str, tokens: tuple[int, ...] = (1, 2), max_new: int = 4, session: str | None = None) -> GenerateRequest:
    params = SamplingParams(max_new_tokens=max_new, temperature=0.0)
    return GenerateRequest(id=name, token_ids=np.array(tokens, np.int32), params=params, seed=0, session=session)


async def started(*engines: StubEngine, **options) -> EnginePool:
    pool = EnginePool(engines, **{"timeout_s": 100.0, "sync_timeout_s": 5.0, **options})
    await pool.start()
    return pool


def states(pool: EnginePool) -> dict[str, str]:
    return {m.id: m.state for m in pool.members()}


# --- Routing ---------------------------------------------------------------------------------------------------------


def test_requests_of_one_context_share_a_replica_and_contexts_spread():
    async def main():
        engines = [StubEngine(f"engine-{i}", token_s=1.0) for i in range(2)]
        pool = await started(*engines)
        work = [pool.generate(request(f"{c}/{i}", tokens=(c, 2))) for c in range(4) for i in range(8)]
        await asyncio.gather(*work)
        return [Counter(r.id[0] for r in e.requests) for e in engines]

    by_engine = run_virtual(main())
    assert [set(c.values()) for c in by_engine] == [{8}, {8}]  # 4 contexts of 8 samples: two whole ones each


def test_a_much_more_loaded_replica_loses_its_preference():
    async def main():
        engines = [StubEngine(f"engine-{i}", token_s=1.0) for i in range(2)]
        pool = await started(*engines)
        await asyncio.gather(*(pool.generate(request(str(i))) for i in range(64)))
        return sorted(len(e.requests) for e in engines)

    # One context only. The first replica keeps it while it runs at most 1.5 * least + 16, so x <= 1.5 y + 16 + 1
    # with x + y = 64: y >= 18.8.
    low, high = run_virtual(main())
    assert low + high == 64 and low >= 18


def test_a_session_stays_on_its_replica_also_when_its_context_grows():
    async def main():
        engines = [StubEngine(f"engine-{i}") for i in range(3)]
        pool = await started(*engines)
        for turn in range(4):
            await asyncio.gather(
                *(pool.generate(request(f"{s}{turn}", tokens=(ord(s), *range(turn)), session=s)) for s in "abcdef")
            )
        return [{r.id[0] for r in e.requests} for e in engines]

    homes = run_virtual(main())
    assert sum(len(h) for h in homes) == 6  # each of the 6 sessions on exactly one of the replicas


def test_no_replica_runs_more_than_its_limit():
    peak = Counter()

    class Watched(StubEngine):
        async def generate(self, r):
            peak[self.id] = max(peak[self.id], len(self._stops) + 1)
            return await super().generate(r)

    async def main():
        engines = [Watched("engine-0", token_s=1.0, max_running=3), Watched("engine-1", token_s=1.0, max_running=2)]
        pool = await started(*engines)
        answers = await asyncio.gather(*(pool.generate(request(str(i))) for i in range(20)))
        return [a.id for a in answers]

    assert run_virtual(main()) == [str(i) for i in range(20)]
    assert peak == {"engine-0": 3, "engine-1": 2}


# --- Failures --------------------------------------------------------------------------------------------------------


def test_a_failed_request_goes_to_another_replica():
    async def main():
        engines = [StubEngine("engine-0", script=Script(fail=Counter(generate=1))), StubEngine("engine-1")]
        pool = await started(*engines)
        answer = await pool.generate(request("a"))
        return answer.finish, [e.served for e in engines], states(pool)

    finish, served, after = run_virtual(main())
    assert (finish, served) == ("length", [[], ["a#2"]])
    assert after == {"engine-0": "ready", "engine-1": "ready"}  # its health answered: it failed, but it is not dead


def test_a_request_that_nobody_answers_in_time_is_cancelled_on_the_engine_and_becomes_data():
    async def main():
        engine = StubEngine(token_s=1000.0)
        pool = await started(engine, max_attempts=2)
        answer = await pool.generate(request("a"))
        return answer, engine.log.count("abort"), asyncio.get_running_loop().time(), pool.members()[0].running

    answer, aborts, now, running = run_virtual(main())
    assert answer.finish == "timeout" and "gave up after 2 attempts" in answer.reason
    assert (aborts, now, running) == (2, 200.0, 0)


def test_when_all_engines_are_dead_the_error_lists_each_with_its_reason():
    async def main():
        engines = [StubEngine(f"engine-{i}", token_s=1.0) for i in range(2)]
        pool = await started(*engines)
        asyncio.get_running_loop().call_later(1.5, engines[0].kill)
        pool_death = asyncio.get_running_loop().call_later(2.5, pool.report_death, "engine-1", "signal 9; log /run/e1.log")
        with pytest.raises(RunFailed) as error:
            await asyncio.gather(*(pool.generate(request(str(i), tokens=(i,))) for i in range(4)))
        pool_death.cancel()
        return str(error.value)

    message = run_virtual(main())
    assert "every engine is dead" in message
    assert "engine-0: dead - engine-0 died; health: engine-0 is dead" in message
    assert "engine-1: dead - signal 9; log /run/e1.log" in message


class Tok:
    def encode(self, text):
        return PromptTokens(token_ids=np.array([1, 2, 3], np.int32), text=text)

    def decode(self, token_ids, *, skip_special=True):
        return "x"


@pytest.mark.parametrize("how", ["kill", "dies_after", "report"])
def test_X1_engine_killed_in_mid_rollout_each_sample_exactly_once(how):
    async def main():
        script = Script(dies_after=3) if how == "dies_after" else Script()
        engines = [StubEngine("engine-0", script=script, token_s=1.0), StubEngine("engine-1", token_s=1.0)]
        pool = await started(*engines)
        loop = asyncio.get_running_loop()
        if how == "kill":
            loop.call_later(2.0, engines[0].kill)
        if how == "report":
            loop.call_later(2.0, pool.report_death, "engine-0", "signal 9")
        contexts = [
            RolloutContext(
                prompt=Prompt(id=str(p), text=str(p)),
                num_samples=8,
                sampling=SamplingParams(max_new_tokens=4),
                pool=pool,
                tokenizer=Tok(),
                seed=1,
                max_context=64,
            )
            for p in range(2)
        ]
        groups = await asyncio.gather(*(SingleTurn().run_group(c) for c in contexts))
        return groups, states(pool), pool.counts

    groups, after, counts = run_virtual(main())
    samples = [s for g in groups for s in g.samples]
    assert sorted(s.trajectory_id for s in samples) == sorted(f"{p}@0/{i}" for p in range(2) for i in range(8))
    assert all(s.status == "length" and s.num_response_tokens == 4 for s in samples)
    assert after == {"engine-0": "dead", "engine-1": "ready"}
    assert counts["requeued"] > 0 and counts["deaths"] == 1


def test_X1_a_dead_engine_is_replaced_and_serves_only_after_it_was_synced():
    async def main():
        async def spare(old):
            return StubEngine("engine-0b")

        first = StubEngine("engine-0", token_s=1.0)
        pool = await started(first, StubEngine("engine-1"), replace=spare)
        await pool.sync(StubTransport(), 1)
        asyncio.get_running_loop().call_later(1.0, first.kill)
        answer = await pool.generate(request("a"))
        await asyncio.sleep(1)
        before = states(pool)
        await pool.resync()
        return answer.versions, before, states(pool), [m.version for m in pool.members()]

    versions, before, after, held = run_virtual(main())
    assert versions[0].version == 1
    assert before == {"engine-1": "ready", "engine-0b": "dirty"}
    assert after == {"engine-1": "ready", "engine-0b": "ready"} and held == [1, 1]


def test_X1_repeated_deaths_end_in_an_error_and_not_in_a_loop():
    born = []

    async def main():
        async def spare(old):
            born.append(StubEngine(f"spare-{len(born)}", script=Script(fail=Counter(start=1))))
            return born[-1]

        engine = StubEngine("engine-0", token_s=1.0)
        pool = await started(engine, replace=spare, max_replacements=3)
        asyncio.get_running_loop().call_later(1.0, engine.kill)
        await pool.generate(request("a"))

    with pytest.raises(RunFailed, match="every engine is dead"):
        run_virtual(main())
    assert len(born) == 3


def test_repairing_brings_a_replacement_back_while_the_loop_waits_for_its_batch():
    async def main():
        async def spare(old):
            return StubEngine("spare")

        engine = StubEngine("engine-0", token_s=1.0)
        pool = await started(engine, replace=spare)
        await pool.sync(StubTransport(), 1)
        asyncio.get_running_loop().call_later(1.0, engine.kill)
        async with pool.repairing():
            answer = await pool.generate(request("a"))  # the only engine dies; nobody pushes
        return answer.versions[0].version, states(pool)

    assert run_virtual(main()) == (1, {"spare": "ready"})


def test_repairing_does_not_push_for_ever_to_an_engine_that_cannot_take_it():
    async def main():
        bad = StubEngine("engine-0", script=Script(fail=Counter(commit=10**6)))
        pool = await started(bad, StubEngine("engine-1"))
        transport = StubTransport()
        await pool.sync(transport, 1)
        async with pool.repairing():
            await asyncio.sleep(100)
        return len([p for p in transport.pushes if "engine-0" in p[1]])

    assert run_virtual(main()) == 2  # the push and one more attempt


def test_an_answer_of_an_old_incarnation_is_dropped():
    class Restarting(StubEngine):
        async def generate(self, r):
            answer = await super().generate(r)
            return replace(answer, incarnation="engine-0/0") if r.id == "a" else answer

    async def main():
        pool = await started(Restarting("engine-0"))
        answer = await pool.generate(request("a"))
        return answer.incarnation, answer.id, pool.counts["dropped_old_incarnation"]

    assert run_virtual(main()) == ("engine-0/1", "a", 1)


def test_an_engine_that_restarted_by_itself_is_dirty():
    async def main():
        engine = StubEngine("engine-0", script=Script(fail=Counter(generate=1)))
        pool = await started(engine, StubEngine("engine-1"))
        engine.incarnation = "engine-0/2"
        await pool.generate(request("a"))
        return states(pool)

    assert run_virtual(main()) == {"engine-0": "dirty", "engine-1": "ready"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"versions": (VersionSpan(start=0, stop=1, version=0),)}, r"spans \[\(0, 1, 0\)\] do not cover its 2 tokens"),
        ({"versions": ()}, "do not cover"),
        ({"versions": (VersionSpan(start=0, stop=2, version=3),)}, "claims version 3, but the pool serves version 0"),
        ({"logprobs": np.zeros(1, np.float32)}, "2 tokens but 1 log-probabilities"),
        ({"logprobs": np.array([0, np.nan], np.float32)}, "not finite"),
    ],
)
def test_a_malformed_answer_names_the_engine(change, message):
    good = Generation(
        id="r", token_ids=np.array([1, 2], np.int32), logprobs=np.zeros(2, np.float32), finish="stop",
        versions=(VersionSpan(start=0, stop=2, version=0),),
    )  # fmt: skip
    check_generation(good, "engine-7", 0)
    with pytest.raises(ContractError, match="engine engine-7, request r.*" + message):
        check_generation(replace(good, **change), "engine-7", 0)


def test_joined_answers_keep_the_version_of_each_token():
    def part(tokens, version):
        return Generation(
            id="r", token_ids=np.array(tokens, np.int32), logprobs=np.full(len(tokens), -version, np.float32),
            finish="stop", versions=(VersionSpan(start=0, stop=len(tokens), version=version),),
        )  # fmt: skip

    whole = join_generations(join_generations(part([1, 2], 1), part([], 1)), part([3], 2))
    assert whole.token_ids.tolist() == [1, 2, 3] and whole.logprobs.tolist() == [-1, -1, -2]
    assert [(s.start, s.stop, s.version) for s in whole.versions] == [(0, 2, 1), (2, 3, 2)]


def test_the_caller_can_give_up_and_use_the_id_again():
    async def main():
        engine = StubEngine(token_s=10.0)
        pool = await started(engine)
        task = asyncio.ensure_future(pool.generate(request("a")))
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        again = await pool.generate(request("a"))
        return again.finish, len(again.token_ids), engine.log.count("abort"), pool.members()[0].running

    assert run_virtual(main()) == ("length", 4, 1, 0)


def test_abort_returns_what_there_is():
    async def main():
        pool = await started(StubEngine(token_s=1.0, max_running=1))
        tasks = [asyncio.ensure_future(pool.generate(request(n, max_new=9))) for n in "ab"]
        await asyncio.sleep(3.5)
        await pool.abort()
        return [(a.finish, len(a.token_ids)) for a in await asyncio.gather(*tasks)]

    assert run_virtual(main()) == [("aborted", 3), ("aborted", 0)]  # one was running, the other still waiting


def test_score_moves_to_another_replica():
    async def main():
        pool = await started(StubEngine("engine-0", script=Script(fail=Counter(score=1))), StubEngine("engine-1"))
        (row,) = await pool.score([np.arange(3)])
        return row["logprobs"].tolist()

    assert run_virtual(main()) == [0.0, -1.0, -1.0]


def test_a_replica_is_removed_after_it_has_finished():
    async def main():
        engines = [StubEngine(f"engine-{i}", token_s=1.0) for i in range(2)]
        pool = await started(*engines)
        tasks = [asyncio.ensure_future(pool.generate(request(str(i), tokens=(i,)))) for i in range(4)]
        await asyncio.sleep(1)
        await pool.remove("engine-0")
        answers = await asyncio.gather(*tasks)
        return states(pool), [a.finish for a in answers], pool.counts["requeued"]

    assert run_virtual(main()) == ({"engine-1": "ready"}, ["length"] * 4, 0)


# --- Weight updates --------------------------------------------------------------------------------------------------


def test_W1_the_answer_after_an_update_is_the_new_one_and_nothing_is_cached():
    async def main():
        engine = StubEngine()
        pool = await started(engine)
        before = await pool.generate(request("a"))
        cached = await pool.generate(request("b"))
        await pool.sync(StubTransport(), 1)
        after = await pool.generate(request("c"))
        return before, cached, after, engine.log

    before, cached, after, log = run_virtual(main())
    # The stub's greedy answer to (1, 2) starts at 100 * weight + 3.
    assert before.token_ids.tolist() == [3, 4, 5, 6] and cached.cached_tokens == 2
    assert after.token_ids.tolist() == [103, 104, 105, 106]
    assert after.cached_tokens == 0 and after.versions[0].version == 1
    order = [p for p in log if p in ("pause", "begin", "ipc", "flush", "commit", "health", "resume")]
    assert order == ["pause", "begin", "ipc", "flush", "commit", "health", "resume"]


def test_W1_the_stub_can_show_the_fault():
    async def main():
        pool = await started(StubEngine(script=Script(keeps_cache=True)))
        await pool.generate(request("a"))
        await pool.sync(StubTransport(), 1)
        return (await pool.generate(request("b"))).token_ids[0]

    assert run_virtual(main()) == 3  # the old answer: what W1 is about


def test_W1_a_failed_flush_fails_the_update_and_nothing_is_served_in_between():
    async def main():
        engines = [StubEngine("engine-0", script=Script(fail=Counter(flush=99))), StubEngine("engine-1", token_s=0.1)]
        pool = await started(*engines)
        report = await pool.sync(StubTransport(), 1)
        seen = len(engines[0].requests)
        answers = await asyncio.gather(*(pool.generate(request(str(i), tokens=(i,))) for i in range(8)))
        return report, states(pool), len(engines[0].requests) - seen, {a.versions[0].version for a in answers}

    report, after, served, versions = run_virtual(main())
    (bad,) = [e for e in report.engines if not e.ok]
    assert (bad.engine, bad.phase) == ("engine-0", "flush")
    assert after == {"engine-0": "dirty", "engine-1": "ready"}
    assert served == 0 and versions == {1}


def test_W1_the_update_fails_when_no_engine_flushes():
    async def main():
        pool = await started(StubEngine(script=Script(fail=Counter(flush=99))))
        with pytest.raises(WeightSyncFailed) as error:
            await pool.sync(StubTransport(), 1)
        return str(error.value), pool.version

    message, version = run_virtual(main())
    assert "engine-0, phase flush" in message and version == 0


def test_a_dirty_engine_serves_again_after_the_immediate_second_attempt():
    async def main():
        pool = await started(StubEngine("engine-0", script=Script(fail=Counter(flush=1))), StubEngine("engine-1"))
        transport = StubTransport()
        report = await pool.sync(transport, 1)
        return [e.ok for e in report.engines], states(pool), transport.pushes

    oks, after, pushes = run_virtual(main())
    assert oks == [True, True] and set(after.values()) == {"ready"}
    assert pushes == [(1, ["engine-0", "engine-1"]), (1, ["engine-0"])]


@pytest.mark.parametrize(
    ("script", "phase", "text"),
    [
        (Script(corrupt=True), "ipc", "bytes arrived changed"),
        (Script(lies_about_version=True), "score", "differ by 1 nats on fixed prompt 0"),
        (Script(fail=Counter(begin=9)), "begin", "begin failed as scripted"),
        (Script(fail=Counter(commit=9)), "commit", "commit failed as scripted"),
        (Script(fail=Counter(resume=9)), "resume", "resume failed as scripted"),
    ],
)
def test_an_engine_that_does_not_hold_the_new_weights_is_out_of_rotation(script, phase, text):
    ids = np.arange(5, dtype=np.int32)

    async def main():
        engines = [StubEngine("engine-0", script=script), StubEngine("engine-1"), StubEngine("engine-2")]
        pool = await started(*engines)
        probe = (ids, stub_logprobs(1, ids), 0.05)
        report = await pool.sync(StubTransport(), 1, probes=[probe])
        await asyncio.gather(*(pool.generate(request(str(i), tokens=(i,))) for i in range(6)))
        return report, states(pool), engines[0].served

    report, after, served = run_virtual(main())
    (bad,) = [e for e in report.engines if not e.ok]
    # A lie about the weights shows in the state hash first where there is a majority; see the next test.
    assert bad.engine == "engine-0" and (bad.phase == phase or (phase == "score" and bad.phase == "verify"))
    assert text in bad.error or "hash differs" in bad.error
    assert after == {"engine-0": "dirty", "engine-1": "ready", "engine-2": "ready"} and served == []


def test_fixed_prompts_find_wrong_weights_where_hashes_cannot():
    ids = np.arange(5, dtype=np.int32)

    async def main():
        pool = await started(StubEngine(script=Script(lies_about_version=True)))
        await pool.sync(StubTransport(), 1, probes=[(ids, stub_logprobs(1, ids), 0.05)])

    # The old weight 0 scores -1, the new one -2: a gap of 1 nat per token.
    with pytest.raises(WeightSyncFailed, match=r"phase score.*differ by 1 nats on fixed prompt 0"):
        run_virtual(main())


@pytest.mark.parametrize("phase", ["pause", "begin", "ipc", "flush", "commit", "health", "resume", "score"])
def test_W5_an_engine_that_never_answers_is_named_with_the_phase_and_the_next_attempt_works(phase):
    ids = np.arange(3, dtype=np.int32)

    async def main():
        engine = StubEngine("engine-1", script=Script(hang={phase}), token_s=100.0)
        pool = await started(StubEngine("engine-0"), engine, timeout_s=1000.0)
        running = [asyncio.ensure_future(pool.generate(request(str(i), tokens=(i,)))) for i in range(2)]
        await asyncio.sleep(1)
        report = await pool.sync(StubTransport(), 1, probes=[(ids, stub_logprobs(1, ids), 0.1)], mode="abort")
        took = asyncio.get_running_loop().time() - 1
        engine.script.hang.clear()
        await pool.sync(StubTransport(), 2)
        answers = await asyncio.gather(*running)
        return report, took, states(pool), [(a.finish, a.versions[0].version) for a in answers]

    report, took, after, answers = run_virtual(main())
    (bad,) = [e for e in report.engines if not e.ok]
    assert bad.engine == "engine-1"
    assert bad.phase == {"health": "verify"}.get(phase, phase)
    assert "engine-1" in bad.error and "no answer within 5 s" in bad.error
    assert took <= 2 * 5.0 + 1e-6  # one phase of 5 s in each of two attempts
    assert after == {"engine-0": "ready", "engine-1": "ready"}
    assert answers[0] == ("length", 0)  # engine-0 had answered before
    assert answers[1] == ("length", 1)  # cut, or taken from engine-1, and sampled by engine-0 under the new weights


def test_W5_an_engine_that_does_not_acknowledge_an_abort_gets_a_second_attempt():
    async def main():
        engine = StubEngine(script=Script(hang={"abort"}), token_s=100.0)
        pool = await started(engine, timeout_s=1000.0)
        running = asyncio.ensure_future(pool.generate(request("a")))
        await asyncio.sleep(1)
        report = await pool.sync(StubTransport(), 1, mode="abort")
        return report.engines[0].ok, asyncio.get_running_loop().time(), (await running).versions[0].version

    # The first attempt ends after 5 s in phase "abort"; the second finds nothing running, and pause ends the request.
    assert run_virtual(main()) == (True, 6.0, 1)


def test_W5_a_transport_that_never_answers_names_every_engine():
    async def main():
        pool = await started(StubEngine("engine-0"), StubEngine("engine-1"), push_timeout_s=30.0)
        with pytest.raises(WeightSyncFailed) as error:
            await pool.sync(StubTransport(hang=True), 1)
        now = asyncio.get_running_loop().time()
        await pool.sync(StubTransport(), 1)  # nothing stayed locked
        return str(error.value), now, states(pool)

    message, now, after = run_virtual(main())
    for name in ("engine-0", "engine-1"):
        assert f"{name}, phase push: the transport did not finish: no answer within 30 s" in message
    assert now == 60.0 and set(after.values()) == {"ready"}


def test_W5_an_engine_that_the_transport_forgot_is_not_served_from():
    async def main():
        pool = await started(StubEngine("engine-0"), StubEngine("engine-1"))
        report = await pool.sync(StubTransport(silent={"engine-1"}), 1)
        return [(e.engine, e.ok, e.error) for e in report.engines], states(pool)

    entries, after = run_virtual(main())
    assert entries[1] == ("engine-1", False, "the transport did not report on it")
    assert after == {"engine-0": "ready", "engine-1": "dirty"}


def test_W5_a_push_that_is_interrupted_leaves_no_engine_half_way():
    async def main():
        pool = await started(StubEngine())
        task = asyncio.ensure_future(pool.sync(StubTransport(push_s=50.0), 1))
        await asyncio.sleep(10)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        interrupted = states(pool)
        await pool.sync(StubTransport(), 1)
        return interrupted, states(pool)

    assert run_virtual(main()) == ({"engine-0": "dirty"}, {"engine-0": "ready"})


def test_W5_requests_that_nobody_can_serve_do_not_wait_for_ever():
    async def main():
        pool = await started(StubEngine(), version=3)  # resumed, never synced
        await pool.generate(request("a"))

    with pytest.raises(RunFailed, match=r"no engine has been ready for 120 s\n.*engine-0: dirty - it joined at version 3"):
        run_virtual(main())  # 100 s for a request and 4 * 5 s for a push


# --- What a push does with running requests --------------------------------------------------------------------------


def push_while_running(mode: str, *, partial: bool = False, max_cuts: int = 1, pushes: int = 1, **stub):
    """(answers, pool, engine, versions seen): two requests of 10 tokens, 1 s each; pushes at 3.5 s, 6.5 s, ..."""

    async def main():
        engine = StubEngine(token_s=1.0, **stub)
        pool = await started(engine, partial=partial, max_cuts=max_cuts)
        work = asyncio.gather(*(pool.generate(request(str(i), tokens=(i,), max_new=10)) for i in range(2)))
        await asyncio.sleep(3.5)
        for version in range(1, pushes + 1):
            await pool.sync(StubTransport(), version, mode=mode)
            await asyncio.sleep(3.0)
        return await work, pool, engine

    return run_virtual(main())


def spans(answer: Generation) -> list[tuple[int, int, int]]:
    return [(s.start, s.stop, s.version) for s in answer.versions]


def test_drain_waits_for_running_requests():
    answers, pool, _ = push_while_running("drain")
    assert [spans(a) for a in answers] == [[(0, 10, 0)]] * 2
    assert pool.counts["cut"] == 0 and pool.version == 1


def test_A3_without_partial_rollout_a_cut_answer_starts_again_with_one_version():
    answers, pool, _ = push_while_running("abort")
    assert [spans(a) for a in answers] == [[(0, 10, 1)]] * 2
    assert pool.counts["cut"] == 2 and pool.counts["cut_tokens"] == 6  # 3 tokens of each were thrown away


def test_A3_with_partial_rollout_every_token_keeps_its_version():
    answers, _, engine = push_while_running("abort", partial=True, max_cuts=5, pushes=2)
    # Cut at 3.5 s (3 tokens) and, 3 s later, again (3 more): 3 + 3 + 4.
    assert [spans(a) for a in answers] == [[(0, 3, 0), (3, 6, 1), (6, 10, 2)]] * 2
    assert answers[0].logprobs.tolist() == [-1] * 3 + [-2] * 3 + [-3] * 4  # those of sampling time
    assert [len(r.token_ids) for r in engine.requests if r.id.startswith("0")] == [1, 4, 7]
    assert [r.params.max_new_tokens for r in engine.requests if r.id.startswith("0")] == [10, 7, 4]


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_A3_requests_that_stay_in_the_engine_carry_both_versions(mode):
    answers, _, _ = push_while_running(mode, partial=True)
    assert [spans(a) for a in answers] == [[(0, 3, 0), (3, 10, 1)]] * 2


def test_A3_without_partial_rollout_a_mixed_answer_is_not_accepted():
    answers, pool, _ = push_while_running("retract")
    assert [spans(a) for a in answers] == [[(0, 10, 1)]] * 2
    assert pool.counts["mixed_discarded"] == 2


def test_a_long_answer_is_not_cut_for_ever():
    answers, pool, _ = push_while_running("abort", pushes=4)
    # 10 s of work, a push every 3 s: cut once, then waited for.
    assert pool.counts["cut"] == 2 and [spans(a) for a in answers] == [[(0, 10, 1)]] * 2


def test_requests_that_arrive_during_a_push_wait_for_the_new_weights():
    async def main():
        pool = await started(StubEngine())
        push = asyncio.ensure_future(pool.sync(StubTransport(push_s=15.0), 1))
        await asyncio.sleep(5)
        answer = await pool.generate(request("a"))
        await push
        return answer.versions[0].version, asyncio.get_running_loop().time()

    assert run_virtual(main()) == (1, 15.0)


def test_pause_and_resume_hold_requests_back():
    async def main():
        pool = await started(StubEngine())
        await pool.pause()
        task = asyncio.ensure_future(pool.generate(request("a")))
        await asyncio.sleep(50)
        waiting = not task.done()
        await pool.resume()
        return waiting, (await task).finish

    assert run_virtual(main()) == (True, "length")


def test_an_engine_that_joins_later_is_dirty_until_it_is_synced():
    async def main():
        pool = await started(StubEngine("engine-0"))
        await pool.add(StubEngine("engine-1"))
        early = states(pool)  # version 0 is what it has loaded
        await pool.sync(StubTransport(), 1)
        await pool.add(StubEngine("engine-2"))
        joined = states(pool)["engine-2"]
        await pool.sync(StubTransport(), 2)
        return early, joined, states(pool)["engine-2"]

    assert run_virtual(main()) == ({"engine-0": "ready", "engine-1": "ready"}, "dirty", "ready")


def test_two_replicas_with_one_id_are_refused():
    with pytest.raises(ContractError, match='two engine replicas have the id "engine-0"'):
        EnginePool([StubEngine(), StubEngine()])


def test_a_worker_that_died_is_dead_without_asking_for_its_health():
    class Gone(StubEngine):
        async def generate(self, r):
            raise WorkerDied("engine-0: signal 9 (out of memory?); log run/engine-0.log")

    async def main():
        engine = Gone("engine-0")
        pool = await started(engine, StubEngine("engine-1"))
        answer = await pool.generate(request("a"))
        return answer.finish, engine.log, pool.members()[0]

    finish, log, member = run_virtual(main())
    assert finish == "length" and "health" not in log
    assert member.state == "dead" and "signal 9" in member.reason


def test_a_start_that_fails_is_raised():
    async def main():
        await started(StubEngine("engine-0"), StubEngine("engine-1", script=Script(fail=Counter(start=1))))

    with pytest.raises(EngineFailed, match="engine-1: start failed"):
        run_virtual(main())
