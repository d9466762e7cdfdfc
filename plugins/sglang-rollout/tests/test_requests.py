"""Requests, interruptions and failures, against a fake server: what is asked, what is tried again, what is not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("aiohttp")
from fake_sglang import FakeSglang, attached

from miles_core.engines import EnginePool
from miles_core.errors import EngineFailed, RunFailed
from miles_core.types import GenerateRequest, SamplingParams, VersionSpan

pytestmark = pytest.mark.timeout(60)


def ask(name: str = "r", count: int = 4, prompt: Any = (1, 2, 3, 4), seed: int = 7, **more: Any) -> GenerateRequest:
    fields = {k: more.pop(k) for k in ("images", "fields") if k in more}
    params = SamplingParams(max_new_tokens=count, **more)
    return GenerateRequest(id=name, token_ids=np.array(prompt, np.int32), params=params, seed=seed, **fields)


def run(work: Callable[[FakeSglang, Any], Coroutine[Any, Any, Any]], folder: Path, **options: Any) -> Any:
    fake = options.pop("fake", None) or FakeSglang(step_s=options.pop("step_s", 0.0))

    async def whole() -> Any:
        async with fake.served(), attached(fake, folder, **options) as engine:
            return await work(fake, engine)

    return asyncio.run(whole())


def test_token_ids_go_in_and_come_out(tmp_path: Path) -> None:
    async def work(fake: FakeSglang, engine: Any) -> Any:
        return await engine.generate(ask(temperature=0.5, top_k=3, stop_token_ids=(9,))), fake.bodies[0]

    made, body = run(work, tmp_path)
    assert (made.token_ids.tolist(), made.finish) == ([10, 11, 12, 13], "length")
    assert made.logprobs.dtype == np.float32 and made.versions == (VersionSpan(start=0, stop=4, version=0),)
    assert body["input_ids"] == [1, 2, 3, 4] and "text" not in body and body["return_logprob"] is True
    sampling = body["sampling_params"]
    wanted = {"max_new_tokens": 4, "temperature": 0.5, "top_k": 3, "stop_token_ids": [9], "sampling_seed": 7}
    assert {name: sampling[name] for name in wanted} == wanted


def test_an_empty_answer_is_an_answer(tmp_path: Path) -> None:
    fake = FakeSglang()
    fake.tokens, fake.finish = 0, {"type": "stop"}
    made = run(lambda fake, engine: engine.generate(ask()), tmp_path, fake=fake)
    assert (len(made.token_ids), made.finish, made.versions) == (0, "stop", ())


def test_a_full_context_answers_at_once(tmp_path: Path) -> None:
    async def work(fake: FakeSglang, engine: Any) -> Any:
        full = await engine.generate(ask("a", prompt=[5] * 12))
        cut = await engine.generate(ask("b", count=50, prompt=[5] * 10))
        return full, cut, len(fake.bodies)

    full, cut, asked = run(work, tmp_path, max_context=12)
    assert (full.finish, len(full.token_ids), asked) == ("length", 0, 1) and "context of 12" in full.reason
    assert len(cut.token_ids) == 2  # 12 - 10


def test_a_proxy_of_the_environment_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens there
    assert run(lambda fake, engine: engine.generate(ask()), tmp_path).finish == "length"


def test_an_abort_ends_this_request_and_none_whose_id_begins_alike(tmp_path: Path) -> None:
    """SGLang ends every request whose id begins with the given one: "p@0/1" would end "p@0/10" too."""

    async def work(fake: FakeSglang, engine: Any) -> Any:
        tasks = [asyncio.ensure_future(engine.generate(ask(f"p@0/{i}", 30))) for i in (1, 10)]
        while min([fake.running.get(b["rid"], 0) for b in fake.bodies] or [0]) < 2 or len(fake.bodies) < 2:
            await asyncio.sleep(0.005)
        await engine.abort(["p@0/1", "unknown"])
        return await asyncio.gather(*tasks)

    cut, whole = run(work, tmp_path, step_s=0.01)
    assert cut.finish == "aborted" and 0 < len(cut.token_ids) < 30
    assert (whole.finish, len(whole.token_ids)) == ("length", 30)


def test_a_connection_that_closes_as_it_is_used_is_tried_once_more(tmp_path: Path) -> None:
    async def work(fake: FakeSglang, engine: Any) -> Any:
        fake.drop = ["generate"]
        made = await engine.generate(ask())
        await asyncio.sleep(0.05)
        return made, fake

    made, fake = run(work, tmp_path)
    assert made.token_ids.tolist() == [10, 11, 12, 13]
    first, second = (body["rid"] for body in fake.bodies)
    assert first != second  # and the first, should it run after all, is taken back
    assert ("abort_request", {"rid": first}) in fake.calls


@pytest.mark.parametrize(("drop", "asked"), [(["half"], 1), (["generate", "generate"], 2)])
def test_a_broken_answer_fails_the_attempt(tmp_path: Path, drop: list[str], asked: int) -> None:
    async def work(fake: FakeSglang, engine: Any) -> Any:
        fake.drop = drop
        with pytest.raises(EngineFailed, match="/generate"):
            await engine.generate(ask())
        return len(fake.bodies)

    assert run(work, tmp_path) == asked


def test_what_the_server_refuses_becomes_a_sample_with_the_reason(tmp_path: Path) -> None:
    async def work(fake: FakeSglang, engine: Any) -> Any:
        fake.refuse["generate"] = (400, "The input (500 tokens) is longer than the model's context length")
        return await engine.generate(ask())

    made = run(work, tmp_path)
    assert made.finish == "error" and "longer than the model's context" in made.reason


def test_who_stops_waiting_takes_the_request_back(tmp_path: Path) -> None:
    async def work(fake: FakeSglang, engine: Any) -> Any:
        task = asyncio.ensure_future(engine.generate(ask(count=1000)))
        while not fake.bodies:
            await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.sleep(0.1)
        return fake

    fake = run(work, tmp_path, step_s=0.05)
    assert ("abort_request", {"rid": fake.bodies[0]["rid"]}) in fake.calls


def test_requests_in_flight_are_bounded_and_cost_no_thread(tmp_path: Path) -> None:
    async def work(fake: FakeSglang, engine: Any) -> Any:
        before = threading.active_count()
        tasks = [asyncio.ensure_future(engine.generate(ask(f"r{i}", 2))) for i in range(300)]
        await asyncio.sleep(0.1)
        threads = threading.active_count() - before
        health = await engine.health()  # a control call does not wait behind them
        done = await asyncio.gather(*tasks)
        return threads, health["running"], [len(g.token_ids) for g in done], fake.most

    threads, running, counts, most = run(work, tmp_path, step_s=0.02, max_in_flight=16)
    assert threads <= 1  # the resolver's, at most
    assert running > 100 and counts == [2] * 300
    assert most == 16


def test_a_retracting_pause_loses_nothing_and_doubles_nothing(tmp_path: Path) -> None:
    async def work(fake: FakeSglang, engine: Any) -> Any:
        tasks = [asyncio.ensure_future(engine.generate(ask(f"r{i}", 20))) for i in range(3)]
        while len(fake.running) < 3 or min(fake.running.values()) < 4:
            await asyncio.sleep(0.002)
        await engine.pause("retract")
        empty = not fake.running
        late = asyncio.ensure_future(engine.generate(ask("late", 2)))
        await asyncio.sleep(0.05)
        quiet = len(fake.bodies)
        await engine.resume()
        return empty, quiet, await asyncio.gather(*tasks), await late, fake.bodies[3:]

    empty, quiet, made, late, rest = run(work, tmp_path, step_s=0.005)
    assert empty and quiet == 3  # the server is empty, and stays so
    for answer in made:
        assert answer.token_ids.tolist() == list(range(10, 30)) and answer.finish == "length"
    assert late.finish == "length"
    for body in rest[:3]:  # each went on behind what it had: 4 prompt tokens and the rest of 20
        assert body["input_ids"][:4] == [1, 2, 3, 4]
        assert len(body["input_ids"]) - 4 + body["sampling_params"]["max_new_tokens"] in (2, 20)


def test_an_abort_ends_a_request_that_a_pause_holds(tmp_path: Path) -> None:
    async def work(fake: FakeSglang, engine: Any) -> Any:
        task = asyncio.ensure_future(engine.generate(ask(count=1000)))
        while not fake.running or min(fake.running.values()) < 2:
            await asyncio.sleep(0.002)
        await engine.pause("retract")
        await engine.abort(["r"])
        return await asyncio.wait_for(task, 5)

    made = run(work, tmp_path, step_s=0.005)
    assert made.finish == "aborted" and len(made.token_ids) >= 2


def test_a_stream_in_place_tells_the_version_of_each_token(tmp_path: Path) -> None:
    from miles_core.types import WeightMessage

    async def work(fake: FakeSglang, engine: Any) -> Any:
        task = asyncio.ensure_future(engine.generate(ask(count=40)))
        while not fake.running or min(fake.running.values()) < 5:
            await asyncio.sleep(0.002)
        await engine.pause("in_place")
        for kind in ("begin", "flush", "commit"):
            await engine.receive(WeightMessage(kind=kind, version=3, incarnation=engine.incarnation))
        await engine.resume()
        return await task, fake

    made, fake = run(work, tmp_path, step_s=0.005, stream=True)
    assert made.token_ids.tolist() == list(range(10, 50))
    first, second = made.versions
    assert (first.start, first.version, second.stop, second.version) == (0, 0, 40, 3) and first.stop == second.start >= 5
    assert fake.count("flush_cache") == 0  # the cache is what "in place" keeps


def test_in_place_without_a_stream_is_refused(tmp_path: Path) -> None:
    async def work(fake: FakeSglang, engine: Any) -> None:
        with pytest.raises(EngineFailed, match="stream = true"):
            await engine.pause("in_place")

    run(work, tmp_path)


def test_stop_strings_need_a_tokenizer_in_the_server(tmp_path: Path) -> None:
    async def work(fake: FakeSglang, engine: Any) -> Any:
        with pytest.raises(EngineFailed, match="no tokenizer"):
            await engine.generate(ask(stop=("\n",)))
        engine.life._info["skip_tokenizer_init"] = False
        await engine.generate(ask(stop=("\n",)))
        return fake.bodies[0]["sampling_params"]["stop"]

    assert run(work, tmp_path) == ["\n"]


def test_images_travel_as_urls_or_data(tmp_path: Path) -> None:
    async def work(fake: FakeSglang, engine: Any) -> Any:
        await engine.generate(ask(images=("http://x/y.png", b"\x89PNG")))
        return fake.bodies[0]["image_data"]

    assert run(work, tmp_path) == ["http://x/y.png", "data:image/png;base64,iVBORw=="]


def test_speculative_statistics_are_kept(tmp_path: Path) -> None:
    fake = FakeSglang()
    fake.meta = {"spec_accept_rate": 0.75, "spec_accept_length": 3.0, "spec_verify_ct": 4}
    made = run(lambda fake, engine: engine.generate(ask()), tmp_path, fake=fake)
    wanted = {"accepted_rate": 0.75, "accepted_length": 3.0, "verifications": 4}
    assert made.extras["speculative"] == wanted


# --- Health ----------------------------------------------------------------------------------------------------------


def test_health_samples_a_token_when_nothing_proves_that_it_can(tmp_path: Path) -> None:
    async def work(fake: FakeSglang, engine: Any) -> Any:
        await engine.health()
        fresh = len(fake.bodies)  # the start has just sampled one
        engine.life.client.last_answer -= 60
        await engine.health()
        return fresh, len(fake.bodies)

    assert run(work, tmp_path) == (0, 1)


def test_a_server_that_answers_and_does_not_compute_is_not_well(tmp_path: Path) -> None:
    async def work(fake: FakeSglang, engine: Any) -> None:
        fake.frozen = True
        engine.life.client.last_answer -= 60
        with pytest.raises(EngineFailed, match=r"sampled no token within 0\.3 s"):
            await engine.health()
        fake.frozen = False

    run(work, tmp_path, control_timeout_s=0.3)


def test_a_busy_server_is_asked_for_its_progress(tmp_path: Path) -> None:
    """A token of its own would wait behind thousands of others."""

    async def work(fake: FakeSglang, engine: Any) -> Any:
        task = asyncio.ensure_future(engine.generate(ask(count=10)))
        while not fake.running:
            await asyncio.sleep(0.002)
        engine.life.client.last_answer -= 60
        await engine.health()
        await task
        return fake.count("health_generate"), len(fake.bodies)

    assert run(work, tmp_path, step_s=0.02) == (1, 1)


def test_an_attached_server_that_was_started_anew_is_not_well(tmp_path: Path) -> None:
    async def work(fake: FakeSglang, engine: Any) -> None:
        engine.life.weights.version = 5
        fake.info["weight_version"] = "default"
        with pytest.raises(EngineFailed, match="serves weight version default and should serve 5"):
            await engine.health()

    run(work, tmp_path)


# --- With the pool ---------------------------------------------------------------------------------------------------


def two_engines(folder: Path, work: Callable[..., Coroutine[Any, Any, Any]], **options: Any) -> Any:
    async def whole() -> Any:
        fakes = [FakeSglang(step_s=0.01), FakeSglang(step_s=0.01)]
        async with (
            fakes[0].served(),
            fakes[1].served(),
            attached(fakes[0], folder, engine_id="engine-0", control_timeout_s=1.0) as first,
            attached(fakes[1], folder, engine_id="engine-1", control_timeout_s=1.0) as second,
        ):
            pool = EnginePool([first, second], **options)
            await pool.start()
            try:
                return await work(pool, fakes)
            finally:
                await pool.close()

    return asyncio.run(whole())


def test_a_stuck_request_is_cancelled_and_served_elsewhere(tmp_path: Path) -> None:
    async def work(pool: EnginePool, fakes: list[FakeSglang]) -> Any:
        tasks = [asyncio.ensure_future(pool.generate(ask(f"r{i}", 3))) for i in range(4)]
        fakes[0].frozen = True
        await asyncio.sleep(0.5)
        fakes[0].frozen = False
        return await asyncio.gather(*tasks), pool.counts["timeouts"]

    made, timeouts = two_engines(tmp_path, work, timeout_s=0.3)
    assert [g.finish for g in made] == ["length"] * 4 and {g.id for g in made} == {"r0", "r1", "r2", "r3"}
    assert timeouts > 0


def test_all_engines_down_ends_with_what_each_said(tmp_path: Path) -> None:
    async def work(pool: EnginePool, fakes: list[FakeSglang]) -> str:
        for fake in fakes:
            fake.refuse |= {"model_info": (503, "going down"), "generate": (503, "going down")}
        with pytest.raises(RunFailed) as caught:
            for i in range(8):
                await pool.generate(ask(f"r{i}"))
        return str(caught.value)

    said = two_engines(tmp_path, work, max_attempts=10)
    assert "every engine is dead" in said
    assert all(f"engine-{i}: dead" in said for i in (0, 1)) and "going down" in said


def test_a_router_serves_requests_and_its_servers_the_rest(tmp_path: Path) -> None:
    async def work() -> Any:
        router, one, two = fakes = FakeSglang(), FakeSglang(), FakeSglang()
        async with AsyncExitStack() as stack:
            for fake in fakes:
                await stack.enter_async_context(fake.served())
            behind = ((one.url, two.url),)
            engine = await stack.enter_async_context(attached(router, tmp_path, control_urls=behind))
            await engine.generate(ask())
            await engine.pause("abort")
            await engine.resume()
            return [len(f.bodies) for f in fakes], [f.count("pause_generation") for f in fakes]

    bodies, pauses = asyncio.run(work())
    assert bodies == [1, 0, 0]
    assert pauses == [0, 1, 1]


def test_an_answer_of_an_earlier_start_is_not_used(tmp_path: Path) -> None:
    async def work(fake: FakeSglang, engine: Any) -> None:
        task = asyncio.ensure_future(engine.generate(ask(count=10)))
        while not fake.running:
            await asyncio.sleep(0.002)
        engine.requests.incarnation = "another"
        with pytest.raises(EngineFailed, match="started anew"):
            await task

    run(work, tmp_path, step_s=0.01)


def test_routed_experts_are_those_of_the_whole_context_across_a_pause(tmp_path: Path) -> None:
    """Two pieces: rows that the first computed stay, those of the second follow."""
    import base64

    from miles_sglang_rollout.wire import Parts, read_experts

    def told(rows: int, value: int) -> str:
        return base64.b64encode(np.full((rows, 2, 2), value, np.int32).tobytes()).decode()

    parts = Parts()
    parts.take_experts(read_experts(told(6, 1), 7, 2))
    parts.take_experts(read_experts(told(9, 2), 10, 2))
    parts.tokens = [0]
    rows = parts.generation("r", "stop", "", "").extras["routed_experts"]
    assert rows.dtype == np.int16 and rows.shape == (9, 2, 2)
    assert (rows[:6] == 1).all() and (rows[6:] == 2).all()


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        ([], "0 numbers came"),
        ([1] * 10, "10 numbers came for 4 tokens: 3 rows"),  # 3 rows of layers x 2 are a multiple of 6
        ([0] * 12, "expert 0 only"),
    ],
)
def test_routed_experts_that_cannot_be_are_refused(numbers: list[int], says: str) -> None:
    import base64

    from miles_sglang_rollout.wire import read_experts

    text = base64.b64encode(np.array(numbers, np.int32).tobytes()).decode()
    with pytest.raises(EngineFailed, match=says):
        read_experts(text, 4, 2)


def test_events_come_in_pieces_of_any_size() -> None:
    from miles_sglang_rollout.wire import Events

    raw = b'data: {"a": 1}\n\ndata: {"b": "\\n\\n"}\n\ndata: [DONE]\n\n'
    for size in (1, 3, len(raw)):
        events = Events()
        found = [e for i in range(0, len(raw), size) for e in events.feed(raw[i : i + size])]
        assert (found, events.done) == ([{"a": 1}, {"b": "\n\n"}], True)
