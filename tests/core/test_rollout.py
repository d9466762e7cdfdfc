"""The single-turn rollout: token in, token out; room in the context; seeds; failures as data."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from miles_core.builtin.rollouts import SingleTurn, fits, prompt_tokens, room
from miles_core.engines import EnginePool
from miles_core.errors import ContractError
from miles_core.fields import FieldSpec
from miles_core.interfaces import Tokenizer
from miles_core.seeds import continue_seed, derive_seed
from miles_core.testing.clock import run_virtual
from miles_core.testing.engines import Script, StubEngine
from miles_core.types import GenerateRequest, Prompt, PromptTokens, RolloutContext, SampleGroup, SamplingParams

TEXTS = {0: "", 1: "he", 2: "llo", 3: "hello", 4: "</s>"}
EOS, PAD = 4, 0


class ToyTokenizer(Tokenizer):
    """he=1, llo=2, hello=3: encoding "hello" gives [3], whatever ids the text came from. Counts its encodes."""

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode(self, text):
        self.encoded.append(text)
        return PromptTokens(token_ids=np.array([3] if text == "hello" else [5] * len(text), np.int32), text=text)

    def render(self, messages, tools=(), images=()):
        return self.encode("".join(m["content"] for m in messages))

    def decode(self, token_ids, *, skip_special=True):
        return "".join(TEXTS.get(int(t), "?") for t in token_ids if not (skip_special and t == EOS))

    stop_token_ids = (EOS,)
    vocab_size = 1000
    template_hash = ""


def run_group(prompt_len: int = 3, *, answer=None, engine=None, num_samples: int = 1, max_new: int = 32, **options):
    """(group, engine, tokenizer) of one group on a stub engine that answers `answer`."""
    fields = options.pop("extras", None)
    engine = engine or StubEngine(**({"answer": lambda weight, request: answer} if answer is not None else {}))
    if fields is not None:
        real = engine.generate

        async def with_fields(request):
            got = await real(request)
            got.extras = fields(request, got)
            return got

        engine.generate = with_fields
    tokenizer = ToyTokenizer()

    async def main() -> SampleGroup:
        pool = EnginePool([engine], timeout_s=100.0, sync_timeout_s=5.0)
        await pool.start()
        context = RolloutContext(
            prompt=options.pop("prompt", None) or Prompt(id="p", text="x" * prompt_len),
            num_samples=num_samples,
            sampling=SamplingParams(max_new_tokens=max_new),
            pool=pool,
            tokenizer=tokenizer,
            seed=options.pop("seed", 42),
            max_context=options.pop("max_context", 64),
            **options,
        )
        group = await SingleTurn().run_group(context)
        await pool.close()
        return group

    return run_virtual(main()), engine, tokenizer


def test_T1_the_sampled_ids_are_the_trained_ids():
    group, _, tokenizer = run_group(answer=[1, 2])
    (sample,) = group.samples
    assert sample.response == "hello"  # which would encode to [3]
    assert sample.tokens[sample.prompt_len :].tolist() == [1, 2]
    assert len(sample.tokens) == len(sample.logprobs) == len(sample.loss_mask) == 5
    assert sample.logprobs.tolist() == [0, 0, 0, -1, -1]  # the stub's logprobs are -1 under weight 0
    assert "hello" not in tokenizer.encoded


def test_T1_a_partial_sample_goes_on_from_its_ids():
    first, _, _ = run_group(answer=[1, 2])
    first.samples[0].status = "aborted"
    group, engine, _ = run_group(answer=[7, EOS], partial=first)
    (request,) = engine.requests
    assert request.token_ids.tolist() == [5, 5, 5, 1, 2]
    assert request.params.max_new_tokens == 30  # 32 - 2
    assert group.samples[0].tokens.tolist() == [5, 5, 5, 1, 2, 7, EOS]
    assert [(s.start, s.stop) for s in group.samples[0].versions] == [(3, 7)]  # one version: one span


@pytest.mark.parametrize(
    ("returned", "max_new", "width", "row", "status"),
    [
        ([7, 8, 9], 3, 5, [1, 1, 1, 0, 0], "length"),  # no EOS: a mask up to the EOS position would be empty or full
        ([7, EOS], 5, 3, [1, 1, 0], "stop"),
        ([7, PAD, 8, EOS], 5, 5, [1, 1, 1, 1, 0], "stop"),  # an id that happens to be PAD's was sampled like any other
    ],
)
def test_T4_the_mask_has_as_many_tokens_as_were_returned(returned, max_new, width, row, status):
    group, _, _ = run_group(answer=returned, max_new=max_new)
    (sample,) = group.samples
    response = sample.loss_mask[sample.prompt_len :]
    assert np.pad(response, (0, width - len(response))).astype(int).tolist() == row  # the row of a padded batch
    assert sample.loss_mask.sum() == len(returned) == sample.num_response_tokens
    assert not sample.loss_mask[:3].any() and sample.status == status


@pytest.mark.parametrize(("prompt_len", "allowed"), [(60, 4), (63, 1), (20, 32)])
def test_D5_new_tokens_are_limited_by_the_room_that_is_left(prompt_len, allowed):
    # Context 64, max_new 32: min(32, 64 - 60) = 4.
    group, engine, _ = run_group(prompt_len)
    (request,) = engine.requests
    assert request.params.max_new_tokens == allowed
    (sample,) = group.samples
    assert (sample.status, sample.num_response_tokens) == ("length", allowed)


@pytest.mark.parametrize("prompt_len", [81, 64])
def test_D5_a_prompt_without_room_sends_no_request(prompt_len):
    # 64 - 81 = -17 and 64 - 64 = 0: neither may reach an engine.
    group, engine, _ = run_group(prompt_len, num_samples=2)
    assert engine.requests == []
    assert not fits(prompt_len, 64)
    assert [s.status for s in group.samples] == ["error", "error"]
    assert f"{prompt_len} tokens leaves no room" in group.samples[0].reason
    assert not group.samples[0].loss_mask.any()


def test_D5_the_pool_refuses_a_request_for_no_tokens():
    async def main():
        pool = EnginePool([StubEngine()])
        await pool.start()
        params = SamplingParams(max_new_tokens=-17)
        await pool.generate(GenerateRequest(id="r", token_ids=np.ones(81, np.int32), params=params, seed=0))

    with pytest.raises(ContractError, match="asks for -17 new ones"):
        run_virtual(main())


@pytest.mark.parametrize(
    ("prompt_len", "context", "new", "expected"), [(60, 64, 32, 4), (64, 64, 32, 0), (81, 64, 32, 0), (81, 0, 32, 32)]
)
def test_room(prompt_len, context, new, expected):
    assert room(prompt_len, context, new) == expected


def test_messages_and_plain_text_are_both_prompts():
    tokenizer = ToyTokenizer()
    assert prompt_tokens(Prompt(id="a", text="hello"), tokenizer).token_ids.tolist() == [3]
    messages = [{"role": "user", "content": "hello"}]
    assert prompt_tokens(Prompt(id="a", messages=messages), tokenizer).token_ids.tolist() == [3]


@pytest.mark.parametrize(("returned", "length"), [([], 0), ([EOS], 1)])
def test_E1_an_empty_response_is_a_sample(returned, length):
    group, _, _ = run_group(answer=returned, num_samples=3)
    assert [s.num_response_tokens for s in group.samples] == [length] * 3
    assert [s.response for s in group.samples] == [""] * 3
    assert [s.status for s in group.samples] == ["stop"] * 3
    assert sum(int(s.loss_mask.sum()) for s in group.samples) == 3 * length


def test_E1_routing_of_an_empty_response_has_one_row_less_than_the_prompt():
    spec = FieldSpec(name="routes", dtype="int16", axes=("layer",), align="transition")
    group, _, _ = run_group(
        answer=[],
        extras=lambda r, g: {"routes": np.ones((2, 4))},
        fields=frozenset({"routes"}),
        field_specs={"routes": spec},
    )
    assert group.samples[0].extras["routes"].shape == (2, 4)  # 3 prompt tokens, 2 transitions
    assert group.samples[0].extras["routes"].dtype == np.int16


def test_a_field_with_the_wrong_number_of_rows_is_refused():
    spec = FieldSpec(name="routes", dtype="int16", align="transition")
    with pytest.raises(ContractError, match=r'field "routes" of p@0/0 has shape \(3,\), but 5 tokens need 4 rows'):
        run_group(
            answer=[1, 2], extras=lambda r, g: {"routes": np.ones(3)}, fields=frozenset({"routes"}),
            field_specs={"routes": spec},
        )  # fmt: skip


@pytest.mark.parametrize("missing", ["error", "mask", "fill:7"])
def test_a_missing_field_is_treated_as_declared(missing):
    spec = FieldSpec(name="tag", dtype="int16", align="token", missing=missing)
    options = {"answer": [1, 2], "extras": lambda r, g: {}, "fields": frozenset({"tag"}), "field_specs": {"tag": spec}}
    if missing == "error":
        with pytest.raises(ContractError, match='p@0/0: field "tag" is missing'):
            run_group(**options)
        return
    (sample,) = run_group(**options)[0].samples
    if missing == "mask":
        assert not sample.loss_mask.any() and "did not return" in sample.reason
    else:
        assert sample.extras["tag"].tolist() == [7] * 5 and sample.loss_mask.sum() == 2


def test_E3_eight_siblings_have_eight_seeds_and_a_rerun_has_the_same():
    def seeds():
        _, engine, _ = run_group(num_samples=8)
        return [r.seed for r in sorted(engine.requests, key=lambda r: r.id)]

    first = seeds()
    assert len(set(first)) == 8
    assert first == seeds()
    assert all(0 <= s < 2**63 for s in first)


def test_E3_seeds_do_not_depend_on_workers_or_steps():
    # Two engines, samples spread over both, or one engine: the same seed per sample. Nothing else goes into a seed.
    async def spread(num_engines: int) -> dict[str, int]:
        engines = [StubEngine(f"engine-{i}", max_running=2, token_s=1.0) for i in range(num_engines)]
        pool = EnginePool(engines)
        await pool.start()
        context = RolloutContext(
            prompt=Prompt(id="p", draw=5, text="xyz"), num_samples=8, sampling=SamplingParams(max_new_tokens=4), pool=pool,
            tokenizer=ToyTokenizer(), seed=42, max_context=64,
        )  # fmt: skip
        await SingleTurn().run_group(context)
        assert all(engine.requests for engine in engines)
        return {r.id: r.seed for engine in engines for r in engine.requests}

    assert run_virtual(spread(1)) == run_virtual(spread(2)) == run_virtual(spread(4))


def test_E3_seeds_are_the_same_in_every_process():
    code = "from miles_core.seeds import derive_seed; print(derive_seed(42, 'p', 5, 3, 1))"
    out = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": h},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for h in ("1", "2")
    ]
    assert out == [f"{derive_seed(42, 'p', 5, 3, 1)}\n"] * 2


def test_E3_every_argument_changes_the_seed():
    base = (42, "p", 5, 3, 1)
    others = [(43, "p", 5, 3, 1), (42, "q", 5, 3, 1), (42, "p", 6, 3, 1), (42, "p", 5, 4, 1), (42, "p", 5, 3, 2)]
    clash = [(4, "2", 1, 1, 1), (4, "1|2", 1, 1, 1), (42, "1", 1, 1, 1)]  # texts that a careless join would confuse
    seeds = {derive_seed(*a) for a in [base, *others, *clash]}
    assert len(seeds) == 9
    assert continue_seed(derive_seed(*base), 4) not in seeds


@pytest.mark.parametrize(
    ("script", "status", "text"),
    [
        (Script(fail=Counter(generate=99)), "error", "generate failed as scripted"),
        (Script(hang={"generate"}), "timeout", "no answer within 100 s"),
    ],
)
def test_a_failed_sample_is_data_with_its_reason(script, status, text):
    group, _, _ = run_group(engine=StubEngine(script=script))
    (sample,) = group.samples
    assert sample.status == status and text in sample.reason
    assert not sample.loss_mask.any() and sample.num_response_tokens == 0


def test_a_cancelled_group_returns_what_it_has_and_its_finished_samples_are_kept():
    # Sample 0 asks for 2 tokens of 1 s each, the others go on; at 5 s the group is cancelled.
    def answer(weight, request):
        return [1, EOS] if request.id.endswith("/0") else [2] * 20

    event = asyncio.Event()

    async def main():
        engine = StubEngine(token_s=1.0, answer=answer)
        pool = EnginePool([engine])
        await pool.start()
        context = RolloutContext(
            prompt=Prompt(id="p", text="x"), num_samples=2, sampling=SamplingParams(max_new_tokens=32), pool=pool,
            tokenizer=ToyTokenizer(), seed=1, max_context=64, cancelled=event,
        )  # fmt: skip
        asyncio.get_running_loop().call_later(5.0, event.set)
        first = await SingleTurn().run_group(context)
        context.cancelled, context.partial = None, first
        second = await SingleTurn().run_group(context)
        return first, second, [r.id for r in engine.requests]

    first, second, requests = run_virtual(main())
    assert [s.status for s in first.samples] == ["stop", "aborted"]
    assert first.samples[1].num_response_tokens == 5 and not first.samples[1].loss_mask.any()
    assert requests == ["p@0/0", "p@0/1", "p@0/1"]  # sample 0 was not sampled again
    assert second.samples[0] is first.samples[0]
    assert second.samples[1].loss_mask.sum() == 5 + 20


def test_a_greedy_baseline_is_sampled_beside_the_group():
    group, engine, _ = run_group(num_samples=2, baseline=True, max_new=4)
    assert len(group.samples) == 2 and group.baseline is not None
    assert group.baseline.temperature == 0.0
    greedy = [r for r in engine.requests if r.params.temperature == 0.0]
    assert len(greedy) == 1 and greedy[0].id == "p@0/baseline"
    assert len({r.seed for r in engine.requests}) == 3


def test_evaluation_samples_as_its_parameters_say():
    group, engine, _ = run_group(evaluation=True)
    assert engine.requests[0].id == "eval/p@0/0" and engine.requests[0].params.temperature == 1.0
    assert group.samples[0].temperature == 1.0
