"""The numpy toy: tokenizer, data, and a whole run that learns."""

import asyncio

import numpy as np
import pytest

from miles_core.batch import apply_advantages, make_batches, prepare
from miles_core.builtin.advantages import group_normalised, per_group
from miles_core.errors import ConfigError
from miles_core.settings import TrainTable
from miles_core.testing import toy, toy_model
from miles_core.testing.toy_engine import ToyEngine
from miles_core.testing.toy_kit import TOKENIZER, engine, push, trainer
from miles_core.types import GenerateRequest, Prompt, Sample, SampleGroup, SamplingParams, VersionSpan

# --- Tokenizer and data ----------------------------------------------------------------------------------------------


def test_a_chat_ends_where_the_assistant_speaks():
    shown = TOKENIZER.render([{"role": "user", "content": "1,2="}]).text
    assert shown == "<bos><user>1,2=<assistant>"
    opened = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "It is"}]
    assert TOKENIZER.render(opened).text == "<bos><user>1<assistant>It is"
    over = [*opened, {"role": "user", "content": "?"}]
    assert TOKENIZER.render(over).text == "<bos><user>1<assistant>It is<eos><user>?<assistant>"


def test_text_round_trips():
    ids = TOKENIZER.encode("a b\n~").token_ids
    assert (ids[0], TOKENIZER.decode(ids)) == (toy_model.BOS, "a b\n~")
    assert TOKENIZER.decode(TOKENIZER.encode("é").token_ids, skip_special=False) == "<bos><unk>"
    with pytest.raises(ConfigError, match='no role "wizard"'):
        TOKENIZER.render([{"role": "wizard", "content": ""}])


def test_data_is_the_same_for_a_seed_and_after_restore():
    def source(seed=1):
        return toy.ToyData(toy.ToyDataConfig(num_prompts=10), seed)

    whole = [(p.id, p.draw) for p in source().next(25)]
    assert len(set(whole)) == 25
    assert sorted(i for i, _ in whole[:10]) == sorted(i for i, _ in whole[10:20])  # an epoch holds each prompt once
    assert whole != [(p.id, p.draw) for p in source(2).next(25)]
    first, second = source(), source()
    head = first.next(7)
    second.restore(first.state())
    assert [(p.id, p.draw) for p in head + second.next(18)] == whole


def test_data_ends_after_its_epochs():
    source = toy.ToyData(toy.ToyDataConfig(num_prompts=4, epochs=2), 0)
    assert [len(source.next(3)) for _ in range(4)] == [3, 3, 2, 0]


# --- All together ----------------------------------------------------------------------------------------------------


async def sampled_group(e: ToyEngine, prompt: Prompt, version: int) -> SampleGroup:
    ids = TOKENIZER.render(prompt.messages).token_ids
    group = f"{prompt.id}@{prompt.draw}"
    params = SamplingParams(max_new_tokens=4, stop_token_ids=TOKENIZER.stop_token_ids)
    requests = [
        GenerateRequest(id=f"{group}/{i}", token_ids=ids, params=params, seed=prompt.draw * 100 + i) for i in range(8)
    ]
    samples = []
    for i, made in enumerate(await asyncio.gather(*map(e.generate, requests))):
        count = len(ids)
        sample = Sample(
            group_id=group,
            trajectory_id=f"{group}/{i}",
            index=i,
            tokens=np.concatenate([ids, made.token_ids]),
            prompt_len=count,
            loss_mask=np.arange(count + len(made.token_ids)) >= count,
            logprobs=np.concatenate([np.zeros(count, np.float32), made.logprobs]),
            versions=tuple(
                VersionSpan(start=s.start + count, stop=s.stop + count, version=s.version) for s in made.versions
            ),
            status=made.finish,
            prompt=prompt,
            response=TOKENIZER.decode(made.token_ids),
        )
        sample.reward = toy.ToyReward().score(sample)
        samples.append(sample)
    return SampleGroup(id=group, prompt=prompt, samples=samples, num_samples=8)


async def learned_rewards(steps):
    data, e, made = toy.ToyData(toy.ToyDataConfig(), 0), await engine(), trainer()
    rewards = []
    for version in range(steps):
        groups = await asyncio.gather(*(sampled_group(e, p, version) for p in data.next(16)))
        batch = prepare(groups, version=version, max_lag=0)
        rule = lambda inputs: per_group(inputs, "grpo", lambda r: group_normalised(r, True, 1e-6))  # noqa: E731
        apply_advantages(batch, [("grpo", rule)])
        for part in make_batches(batch, TrainTable()):
            made.step(part)
        rewards.append(np.mean([s.reward for g in groups for s in g.samples]))
        await e.pause()
        await push(e, made, version + 1)
        await e.resume()
    return rewards


def test_the_toy_learns_and_a_rerun_is_the_same():
    rewards = asyncio.run(learned_rewards(40))
    assert np.mean(rewards[:2]) < 0.25  # one of ten digits, and the end after it
    assert np.mean(rewards[-5:]) > 0.9
    assert asyncio.run(learned_rewards(5)) == rewards[:5]
