"""Megatron's parameters and Hugging Face's, both ways."""

import json

import pytest
import torch
from safetensors.torch import load_file

from miles_megatron_trainer import names


def plan_of(folder, stages=1, padded=64):
    return names.plan(names.read_config(folder, "model.path"), stages, padded)


@pytest.mark.parametrize("model", ["llama", "qwen2", "qwen3", "qwen3-untied"])
@pytest.mark.parametrize("tp", [1, 2])
def test_every_tensor_of_a_folder_comes_back_bit_for_bit(tiny, model, tp):
    tensors, found = load_file(tiny[model] / "model.safetensors"), {}
    for weight in plan_of(tiny[model]):
        shards = [names.shard(weight, [tensors[name] for name, _ in weight.hf], tp, rank) for rank in range(tp)]
        found |= dict(zip((name for name, _ in weight.hf), names.join(weight, shards), strict=True))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("stages", [1, 2])
def test_no_two_parameters_hold_the_same_tensor(tiny, stages):
    plan = plan_of(tiny["qwen3-untied"], stages)
    theirs = [name for weight in plan for name, _ in weight.hf]
    assert len(theirs) == len(set(theirs))
    assert len({(weight.stage, weight.name) for weight in plan}) == len(plan)
    assert {weight.stage for weight in plan} == set(range(stages))


def test_W3_a_tied_head_is_the_embedding_and_a_copy_of_it_on_the_last_stage(tiny):
    plan = plan_of(tiny["qwen3"], 2)
    assert "lm_head.weight" not in [name for weight in plan for name, _ in weight.hf]
    copy = names.tied_copy(plan, 2)
    assert (copy.name, copy.stage, copy.hf) == ("output_layer.weight", 1, plan[0].hf)
    assert names.tied_copy(plan_of(tiny["qwen3"]), 1) is None
    assert names.tied_copy(plan_of(tiny["llama"], 2), 2) is None


def test_C6_a_vocabulary_of_151936_survives_any_padding(tiny, tmp_path):
    config = json.loads((tiny["llama"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 151_936}))
    table = torch.arange(151_936 * 2, dtype=torch.float32).view(-1, 2)
    for tp in (1, 2, 3, 8):
        per = 128 * tp
        padded = -(-151_936 // per) * per
        weight = plan_of(tmp_path, padded=padded)[0]
        shards = [names.shard(weight, [table], tp, rank) for rank in range(tp)]
        assert {len(part) for part in shards} == {padded // tp}
        assert not torch.cat(shards)[151_936:].any()
        assert torch.equal(names.join(weight, shards)[0], table)
