"""Pauses, aborts, sleep."""

from __future__ import annotations

import asyncio

import pytest

from miles_core.errors import EngineFailed


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


LONG = 400  # tokens: long enough to be caught in the middle


def test_pause_abort_returns_partial_output_and_queues_what_comes(model_folder, serve, ask, prompt, until):
    async def go():
        async with serve(model_folder("llama"), max_running=2) as engine:
            requests = [ask(str(i), prompt(5), seed=i, max_new_tokens=LONG) for i in range(3)]
            tasks = [asyncio.create_task(engine.generate(r)) for r in requests]
            await until(engine, 3)
            await engine.pause("abort")
            answers = await asyncio.gather(*tasks)
            late = asyncio.create_task(engine.generate(ask("late", prompt(5), seed=9)))
            await asyncio.sleep(0.05)
            assert (await engine.health())["waiting"] == 1
            assert not late.done()
            await engine.resume()
            whole = await engine.generate(requests[0])
            return answers, await late, whole

    answers, late, whole = run(go())
    assert [a.finish for a in answers] == ["aborted"] * 3
    assert 3 <= len(answers[0].token_ids) < LONG
    assert len(answers[0].logprobs) == len(answers[0].token_ids) == answers[0].versions[0].stop
    assert len(answers[2].token_ids) == 0  # it was still waiting for a row
    assert late.finish == "length"
    assert whole.token_ids[: len(answers[0].token_ids)].tolist() == answers[0].token_ids.tolist()


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_requests_go_on_after_a_pause_as_if_there_had_been_none(mode, model_folder, serve, ask, prompt, until):
    async def go(pauses):
        async with serve(model_folder("llama")) as engine:
            requests = [ask(str(i), prompt(5 + i), seed=i, max_new_tokens=LONG) for i in range(3)]
            tasks = [asyncio.create_task(engine.generate(r)) for r in requests]
            for count in (3, 40)[:pauses]:
                await until(engine, count)
                await engine.pause(mode)
                held = [len(r.tokens) for r in engine._batch.running]
                assert len(held) == (3 if mode == "in_place" else 0)
                assert all(0 < n < LONG for n in held)
                await asyncio.sleep(0.02)
                assert [len(r.tokens) for r in engine._batch.running] == held  # nothing is sampled
                await engine.resume()
            return [a.token_ids.tolist() for a in await asyncio.gather(*tasks)]

    assert run(go(2)) == run(go(0))


def test_an_id_that_is_running_is_refused(model_folder, serve, ask, prompt, until):
    async def go():
        async with serve(model_folder("llama")) as engine:
            task = asyncio.create_task(engine.generate(ask("a", prompt(5), max_new_tokens=LONG)))
            await until(engine, 1)
            with pytest.raises(EngineFailed, match="already runs a request a"):
                await engine.generate(ask("a", prompt(5)))
            await engine.abort()
            await task
            assert (await engine.generate(ask("a", prompt(5)))).finish == "length"

    run(go())


def test_an_unknown_pause_mode_is_refused(model_folder, serve):
    async def go():
        async with serve(model_folder("llama")) as engine:
            await engine.pause("freeze")

    with pytest.raises(EngineFailed, match="abort, retract, in_place"):
        run(go())


def test_abort_ends_the_named_requests_alone_and_returns_when_they_have_ended(model_folder, serve, ask, prompt, until):
    async def go():
        async with serve(model_folder("llama"), max_running=3) as engine:
            tasks = {
                n: asyncio.create_task(engine.generate(ask(n, prompt(5), seed=i, max_new_tokens=LONG)))
                for i, n in enumerate("abcd")
            }
            await until(engine, 3)
            await engine.abort(["b", "d", "unknown"])
            assert "b" not in [r.request.id for r in engine._batch.running]
            first = await asyncio.gather(tasks["b"], tasks["d"])
            assert not tasks["a"].done()
            await engine.abort()
            return first, await asyncio.gather(tasks["a"], tasks["c"])

    (b, d), (a, c) = run(go())
    assert [x.finish for x in (a, b, c, d)] == ["aborted"] * 4
    assert len(b.token_ids) >= 3 and len(d.token_ids) == 0
    assert len(a.token_ids) >= len(b.token_ids)


def test_a_cancelled_caller_leaves_no_row_behind(model_folder, serve, ask, prompt, until):
    async def go():
        async with serve(model_folder("llama")) as engine:
            task = asyncio.create_task(engine.generate(ask("a", prompt(5), max_new_tokens=LONG)))
            await until(engine, 3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await engine.abort([])  # a command after the removal
            return await engine.health()

    health = run(go())
    assert (health["running"], health["waiting"]) == (0, 0)


def test_a_sleeping_engine_serves_nothing_and_wakes_with_its_requests(model_folder, serve, ask, prompt, until):
    async def go(sleeps):
        async with serve(model_folder("llama")) as engine:
            task = asyncio.create_task(engine.generate(ask("a", prompt(5), max_new_tokens=LONG)))
            if sleeps:
                await until(engine, 3)
                await engine.sleep()
                assert engine._batch.rows.k is None
                with pytest.raises(EngineFailed, match="asleep"):
                    await engine.generate(ask("b", prompt(5)))
                await engine.wake(["weights"])
                with pytest.raises(EngineFailed, match="asleep"):
                    await engine.score([prompt(5)])
                await engine.wake(["cache"])
                await engine.resume()
            return (await task).token_ids.tolist()

    assert run(go(True)) == run(go(False))


def test_a_new_start_is_a_new_incarnation(model_folder, serve, ask, prompt):
    async def go():
        async with serve(model_folder("llama")) as engine:
            return engine.incarnation, (await engine.generate(ask("a", prompt(3)))).incarnation

    first, second = run(go()), run(go())
    assert first[0] == first[1] != second[0]


def test_a_folder_without_a_model_is_an_error_that_names_it(tmp_path, serve):
    async def go():
        async with serve(tmp_path):
            pass

    with pytest.raises(EngineFailed, match=str(tmp_path)):
        run(go())
