"""Recorded answers: exact token ids, pairs, what is refused, and runs that learn from them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from pydantic import ValidationError

import miles_recorded_rollout
from miles_core import Environment
from miles_core.errors import ConfigError, DataError
from miles_core.testing.toy import ToyTokenizer
from miles_core.testing.toy_model import ASSISTANT, BOS, EOS, USER, token_id
from miles_core.types import Prompt, PromptTokens, RolloutContext, SamplingParams

(RECORDED,) = miles_recorded_rollout.miles_rollouts()
ASK = {"role": "user", "content": "3,4="}
QUESTION = [BOS, USER, *map(token_id, "3,4="), ASSISTANT]
TOY = ToyTokenizer()


def group(prompt, *, tokenizer=TOY, num_samples=1, max_new_tokens=24, max_context=100, version=7, **options):
    rollout = RECORDED.build(RECORDED.config(**options), SimpleNamespace(logger=SimpleNamespace(warning=lambda *a: None)))
    context = RolloutContext(
        prompt=prompt, num_samples=num_samples, sampling=SamplingParams(max_new_tokens=max_new_tokens, temperature=0.5),
        pool=SimpleNamespace(version=version), tokenizer=tokenizer, seed=0, max_context=max_context, order=4,
    )  # fmt: skip
    return asyncio.run(rollout.run_group(context))


def chat(*messages, **row):
    return Prompt(id="row-1", draw=3, messages=list(messages or (ASK,)), label="34", metadata=row)


def test_an_answer_is_the_tokens_after_the_prompt_and_an_end():
    made = group(chat(response="3"))
    (sample,) = made.samples
    assert sample.tokens.tolist() == [*QUESTION, token_id("3"), EOS] and sample.prompt_len == len(QUESTION)
    assert sample.loss_mask.tolist() == [False] * len(QUESTION) + [True, True]
    assert not sample.logprobs.any() and sample.temperature == 0.5 and sample.status == "stop"
    assert [(s.start, s.stop, s.version) for s in sample.versions] == [(len(QUESTION), len(QUESTION) + 2, 7)]
    assert (made.id, made.born_version, made.order, sample.response) == ("row-1@3", 7, 4, "3")
    assert sample.metadata == {"recorded": True}


def test_a_pair_is_two_marked_samples():
    row = {"chosen": "3", "rejected": {"role": "assistant", "content": "4"}}
    samples = group(chat(**row), num_samples=2, answers="pair").samples
    assert [s.metadata for s in samples] == [
        {"recorded": True, "pair": 0, "chosen": True},
        {"recorded": True, "pair": 0, "chosen": False},
    ]
    assert [s.response for s in samples] == ["3", "4"]


@pytest.mark.parametrize(
    ("prompt", "options", "texts"),
    [
        (chat(response=["3", "4"]), {}, ["3", "4"]),
        (chat(gold="x"), {"response_key": "gold"}, ["x"]),
        (chat(response={"role": "assistant", "content": "3"}), {}, ["3"]),
        (chat(), {"answers": "label"}, ["34"]),
        (Prompt(id="p", text="1+1=", label=2), {"answers": "label"}, ["2"]),
        (Prompt(id="p", text="1+1=", label=["2", "two"]), {"answers": "label"}, ["2", "two"]),
        (chat(ASK, {"role": "assistant", "content": "3"}), {"answers": "last-message"}, ["3"]),
        (chat(yes="3", no="4"), {"answers": "pair", "chosen_key": "yes", "rejected_key": "no"}, ["3", "4"]),
    ],
)
def test_where_answers_stand(prompt, options, texts):
    samples = group(prompt, num_samples=len(texts), **options).samples
    assert [s.response for s in samples] == texts and all(s.tokens[-1] == EOS for s in samples)


def test_the_last_message_is_no_part_of_the_prompt():
    (sample,) = group(chat(ASK, {"role": "assistant", "content": "34"}), answers="last-message").samples
    assert sample.tokens.tolist() == [*QUESTION, token_id("3"), token_id("4"), EOS]
    assert sample.prompt.messages == [ASK]


def test_an_opened_answer_is_continued():
    (sample,) = group(chat(ASK, {"role": "assistant", "content": "3"}, response="4")).samples
    assert sample.tokens.tolist() == [*QUESTION, token_id("3"), token_id("4"), EOS]
    assert sample.prompt_len == len(QUESTION) + 1  # what opens the answer is not trained


@pytest.mark.parametrize(
    ("limits", "long_answers", "length", "status"),
    [
        ({"max_new_tokens": 4}, "cut", 4, "stop"),  # three tokens and the end just fit
        ({"max_new_tokens": 3}, "cut", 3, "length"),  # no end: the policy must not learn to stop here
        ({"max_context": len(QUESTION) + 2}, "cut", 2, "length"),
        ({"max_new_tokens": 3}, "skip", 3, "error"),
        ({"max_context": len(QUESTION)}, "cut", 0, "error"),
    ],
)
def test_long_answers_are_cut_or_skipped(limits, long_answers, length, status):
    (sample,) = group(chat(response="345"), long_answers=long_answers, **limits).samples
    assert (sample.num_response_tokens, sample.status) == (length, status)
    assert int(sample.loss_mask.sum()) == (0 if status == "error" else length)
    assert bool(sample.reason) == (status != "stop") and (EOS in sample.tokens) == (status == "stop")


class Merging(ToyTokenizer):
    """Writes "=3" as one token: encoded together, the prompt's last token changes."""

    def _prompt(self, ids):
        merged = list(ids)
        for i in reversed(range(len(ids) - 1)):
            if ids[i : i + 2] == [token_id("="), token_id("3")]:
                merged[i : i + 2] = [token_id("~")]
        return PromptTokens(token_ids=np.array(merged, dtype=np.int32), text="")


def test_tokens_of_the_prompt_never_change():
    prompt = Prompt(id="p", text="1+2=", metadata={"response": "3"})
    (sample,) = group(prompt, tokenizer=Merging()).samples
    assert sample.tokens.tolist() == [BOS, *map(token_id, "1+2="), token_id("3"), EOS]
    assert sample.prompt_len == 5


def test_the_end_is_what_the_template_puts_there():
    class TwoStops(ToyTokenizer):
        stop_token_ids = (BOS, EOS)

    def ends(**options):
        prompts = chat(response="3"), Prompt(id="p", text="1+2=", metadata={"response": "3"})
        return [group(p, tokenizer=TwoStops(), **options).samples[0].tokens[-1] for p in prompts]

    assert ends() == [EOS, BOS]
    assert ends(stop_token_id=EOS) == [EOS, EOS]
    with pytest.raises(ConfigError, match="stop_token_id = 50 is none of the tokenizer's stop tokens: 0, 1"):
        ends(stop_token_id=50)


@pytest.mark.parametrize(
    ("prompt", "options", "error", "says"),
    [
        (chat(other=1), {}, DataError, 'has no "response" to take'),
        (chat(chosen="3"), {"answers": "pair"}, DataError, 'no "rejected"'),
        (chat(response=None), {}, DataError, 'no "response"'),
        (chat(response=True), {}, DataError, "neither a text nor one message"),
        (chat(response=[["a", "b"]]), {}, DataError, "neither a text nor one message"),
        (chat(), {"answers": "last-message"}, DataError, "does not end with a message of the assistant"),
        (chat(response=["3", "4"]), {}, ConfigError, "has 2 answers, and rollout.samples_per_group is 1"),
    ],
)
def test_rows_that_cannot_be_are_named(prompt, options, error, says):
    with pytest.raises(error, match=says):
        group(prompt, **options)


def test_options_are_refused_where_nothing_reads_them():
    with pytest.raises(ValidationError, match='response_key is not read with answers = "pair"'):
        RECORDED.config(answers="pair", response_key="x")
    run = SimpleNamespace(rollout=SimpleNamespace(samples_per_group=8))
    with pytest.raises(ConfigError, match=r"rollout.use: a pair is two samples, and rollout.samples_per_group = 8"):
        RECORDED.check(RECORDED.config(answers="pair"), Environment(run_config=run, where="rollout.use"))
    RECORDED.check(RECORDED.config(), Environment(run_config=run, where="rollout.use"))


def test_a_greedy_baseline_is_refused():
    rollout = RECORDED.build(RECORDED.config(), SimpleNamespace(logger=None))
    context = SimpleNamespace(prompt=chat(response="3"), evaluation=False, baseline=True)
    with pytest.raises(ConfigError, match="greedy baseline"):
        asyncio.run(rollout.run_group(context))


# --- Runs --------------------------------------------------------------------------------------------------------------

SFT = """
steps = 40
seed = 3
plugins = ["recorded-rollout", "policy-losses"]
tokenizer.use = "toy"
engine.use = "toy"
checkpoint.save_model = false
[data]
use = "jsonl"
jsonl.path = "{data}"
[rollout]
use = "recorded"
recorded.answers = "label"
groups_per_step = 25
samples_per_group = 1
update_every = 40
[trainer]
use = "toy"
toy.lr = 0.05
[[reward]]
use = "toy"
[[loss]]
use = "sft"
[[eval]]
num_prompts = 50
data.use = "toy"
"""
DPO = """
steps = 6
plugins = ["recorded-rollout", "policy-losses", "torch-rollout", "fsdp-trainer"]
model.path = "{model}"
tokenizer.use = "toy"
engine.use = "torch"
checkpoint.save_model = false
[data]
use = "jsonl"
jsonl.path = "{data}"
jsonl.require_label = false
[rollout]
use = "recorded"
recorded.answers = "pair"
groups_per_step = 8
samples_per_group = 2
[trainer]
use = "fsdp"
fsdp.lr = 0.01
fsdp.max_tokens = 40
[[loss]]
use = "dpo"
dpo.beta = 1.0
[roles.reference]
"""


def miles_run(tmp_path, text, rows):
    """Metrics of the steps, and of the evaluations, of a run on these rows."""
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    model = tmp_path / "model"
    (tmp_path / "run.toml").write_text(text.format(data=tmp_path / "data.jsonl", model=model))
    command = [sys.executable, "-m", "miles_cli.main", "run", str(tmp_path / "run.toml"), "--out", str(tmp_path / "out")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = (tmp_path / "out").glob("*/metrics.jsonl")
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    return [row for row in lines if "train/loss" in row], [row for row in lines if "eval/eval/reward" in row]


def test_sft_on_recorded_answers_teaches_the_toy(tmp_path):
    """Cross-entropy on "a,b=" -> "a"; the evaluation samples greedily from the engine."""
    pairs = [(a, b) for a in range(10) for b in range(10)]
    rows = [{"messages": [{"role": "user", "content": f"{a},{b}="}], "label": str(a)} for a, b in pairs]
    steps, evals = miles_run(tmp_path, SFT, rows)
    nll = [row["loss/sft/nll"] for row in steps]
    assert nll[0] > 1 and nll[-1] < 0.2
    assert evals[0]["eval/eval/reward"] < 0.3 and evals[-1]["eval/eval/reward"] > 0.9
    assert all(row["reward/mean"] == 1 for row in steps)  # what was recorded is right
    assert not any(name.startswith("gap/") for name in steps[0])


def test_dpo_on_recorded_pairs_prefers_the_chosen(tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("miles_fsdp_trainer")
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=TOY.vocab_size, num_key_value_heads=2, **shape)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"{i}=", "chosen": "yes", "rejected": "no, " + "no" * i} for i in range(8)]
    steps, _ = miles_run(tmp_path, DPO, rows)
    first, last = steps[0], steps[-1]
    assert first["loss/dpo/value"] == pytest.approx(np.log(2), rel=1e-4)  # the policy is the reference
    assert last["loss/dpo/value"] < 0.3 and last["loss/dpo/accuracy"] == 1 and last["loss/dpo/margin"] > 1
    assert first["pairs/trained"] == 8 and first["pairs/undecided"] == 0
