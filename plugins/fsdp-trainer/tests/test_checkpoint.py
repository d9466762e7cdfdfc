"""What leaves a rank and comes back: export, checkpoint, Hugging Face folder."""

import json

import fsdp_support as support
import pytest
import torch
from fsdp_support import close, parameters, random_batch, rank_of
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from miles_core.errors import RunFailed
from miles_core.types import TrainBatch


def trained(folder, steps=3, **options):
    rank = rank_of(folder, schedule="linear", warmup_steps=2, **options)
    for seed in range(steps):
        rank.step(random_batch(seed=seed))
    return rank


def received(rank, bucket_bytes):
    """The export as an engine reads it: copied out of each bucket before the next is asked for."""
    tensors, sizes = {}, []
    for bucket in rank.export("hf_full", bucket_bytes):
        assert bucket.data.dtype == torch.uint8 and bucket.nbytes == len(bucket.data)
        sizes.append(bucket.nbytes)
        for spec in bucket.tensors:
            dtype = getattr(torch, spec.dtype)
            count = torch.Size(spec.shape).numel() * dtype.itemsize
            view = bucket.data[spec.offset : spec.offset + count].view(dtype).view(spec.shape)
            assert spec.name not in tensors
            tensors[spec.name] = view.clone()
    return tensors, sizes


def test_C5_continuation_after_a_checkpoint_is_bit_equal(tiny, tmp_path):
    rank = trained(tiny["llama-tied"])
    rank.save(tmp_path)
    other = rank_of(tiny["llama-tied"], schedule="linear", warmup_steps=2)
    other.load(tmp_path)
    close(other.roles["policy"].optimizer.moments(), rank.roles["policy"].optimizer.moments(), rtol=0, atol=0)
    assert other.roles["policy"].optimizer.step_count == 3 and other.state_hash() == rank.state_hash()
    a, b = (r.step(random_batch(seed=7)) for r in (rank, other))
    assert (a.loss, a.grad_norm, a.lr) == (b.loss, b.grad_norm, b.lr)
    close(parameters(other), parameters(rank), rtol=0, atol=0)


def test_C5_a_parameter_that_no_loss_reaches_has_no_moments_and_is_not_missed(tiny, tmp_path, monkeypatch):
    from miles_fsdp_trainer import roles

    load_model = roles.load_model

    def with_spare(*args, **kwargs):
        model = load_model(*args, **kwargs)
        model.spare = torch.nn.Parameter(torch.ones(3))
        return model

    monkeypatch.setattr(roles, "load_model", with_spare)
    rank, other = trained(tiny["llama"]), rank_of(tiny["llama"])
    rank.save(tmp_path)
    other.load(tmp_path)
    moments = other.roles["policy"].optimizer.moments()
    assert "exp_avg.spare" not in moments and "exp_avg.lm.lm_head.weight" in moments


@pytest.mark.parametrize("file", ["policy.safetensors", "policy-optimizer.safetensors", "trainer.json", "rng.safetensors"])
def test_C5_a_missing_file_is_an_error_and_changes_nothing(tiny, tmp_path, file):
    trained(tiny["llama"]).save(tmp_path)
    (tmp_path / file).unlink()
    rank = rank_of(tiny["llama"])
    before = rank.state_hash()
    with pytest.raises(RunFailed, match=r"missing"):
        rank.load(tmp_path)
    assert rank.state_hash() == before


def test_C5_weights_only_is_explicit(tiny, tmp_path):
    rank = trained(tiny["llama"])
    rank.save(tmp_path)
    (tmp_path / "policy-optimizer.safetensors").unlink()
    other = rank_of(tiny["llama"])
    other.load(tmp_path, weights_only=True)
    assert other.state_hash() == rank.state_hash() and not other.roles["policy"].optimizer.moments()


def test_C5_every_missing_and_unexpected_key_is_listed(tiny, tmp_path):
    trained(tiny["llama"]).save(tmp_path)
    file = tmp_path / "policy-optimizer.safetensors"
    moments = load_file(file)
    for name in ("exp_avg.lm.lm_head.weight", "exp_avg_sq.lm.model.norm.weight"):
        del moments[name]
    moments |= {"exp_avg.lm.extra": torch.zeros(1), "exp_avg.lm.model.norm.weight": torch.zeros(3)}
    save_file(moments, file)
    with pytest.raises(RunFailed) as caught:
        rank_of(tiny["llama"]).load(tmp_path)
    assert str(caught.value).splitlines()[1:] == [
        "  missing: exp_avg.lm.lm_head.weight",
        "  missing: exp_avg_sq.lm.model.norm.weight",
        "  unexpected: exp_avg.lm.extra",
        "  shape of exp_avg.lm.model.norm.weight: (3,) in the file, (32,) in the model",
    ]


def test_a_damaged_file_is_named(tiny, tmp_path):
    trained(tiny["llama"]).save(tmp_path)
    (tmp_path / "policy.safetensors").write_bytes(b"junk")
    with pytest.raises(RunFailed, match=r"policy.safetensors is damaged"):
        rank_of(tiny["llama"]).load(tmp_path)


def test_a_checkpoint_before_the_first_step_loads(tiny, tmp_path):
    rank_of(tiny["llama"]).save(tmp_path)
    rank_of(tiny["llama"]).load(tmp_path)


def test_a_checkpoint_holds_no_pickle(tiny, tmp_path):
    trained(tiny["llama"]).save(tmp_path)
    assert {p.suffix for p in tmp_path.iterdir()} == {".safetensors", ".json"}
    assert json.loads((tmp_path / "trainer.json").read_text())["optimizer_steps"] == {"policy": 3}


@pytest.mark.parametrize("name", ["llama-tied", "llama"])
def test_W3_export_is_what_the_config_says_about_tied_embeddings(tiny, tmp_path, name):
    rank = trained(tiny[name])
    tensors, _ = received(rank, 4096)
    assert ("lm_head.weight" in tensors) == (name == "llama")
    rank.save_model(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == tensors.keys()
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert model.lm_head.weight.equal(model.model.embed_tokens.weight) == (name == "llama-tied")
    close({k: v for k, v in model.state_dict().items() if k in tensors}, tensors, rtol=0, atol=0)
    batch = random_batch(seed=4)
    ours = rank.forward(batch, "policy", frozenset({"logprobs"}))["logprobs"]
    for s, values in zip(batch.samples, ours, strict=True):
        want = support.reference_logprobs(model, s).detach().numpy() * s.loss_mask
        assert abs(values - want).max() < 1e-4


def test_W3_a_tied_checkpoint_that_holds_both_copies(tiny, tmp_path):
    rank_of(tiny["llama-tied"]).save_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    rank = rank_of(tmp_path)
    rank.step(random_batch())
    lm = rank.roles["policy"].model.lm
    assert lm.lm_head.weight is lm.model.embed_tokens.weight
    assert "lm_head.weight" not in received(rank, 1 << 20)[0]


@pytest.mark.parametrize("bucket_bytes", [1, 4096, 1 << 30])
def test_buckets_are_bounded_and_carry_every_weight_bit_for_bit(tiny, bucket_bytes):
    rank = trained(tiny["llama"])
    tensors, sizes = received(rank, bucket_bytes)
    close({"lm." + k: v for k, v in tensors.items()}, parameters(rank), rtol=0, atol=0)
    largest = max(t.nbytes for t in tensors.values())
    assert max(sizes) <= max(bucket_bytes, largest)
    assert len(sizes) == {1: len(tensors), 1 << 30: 1}.get(bucket_bytes, len(sizes))


def test_the_hash_changes_with_the_weights_and_only_then(tiny):
    rank = rank_of(tiny["llama"])
    first = rank.state_hash()
    rank.forward(random_batch(), "policy", frozenset({"logprobs"}))
    assert rank.state_hash() == first == rank_of(tiny["llama"]).state_hash()
    rank.step(random_batch())
    assert rank.state_hash() != first


def test_fused_experts_leave_under_checkpoint_names(tmp_path):
    config = Qwen3MoeConfig(
        vocab_size=support.VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "a")
    rank = rank_of(tmp_path / "a")
    tensors, _ = received(rank, 1 << 20)
    assert tensors.keys() == load_file(tmp_path / "a" / "model.safetensors").keys()
    assert "model.layers.0.mlp.experts.3.gate_proj.weight" in tensors
    rank.step(random_batch())
    rank.save_model(tmp_path / "b")
    assert rank_of(tmp_path / "b").state_hash() == rank.state_hash()


def test_large_models_are_saved_in_parts(tiny, tmp_path):
    from miles_fsdp_trainer.weights import write_hf_folder

    rank = trained(tiny["llama"])
    write_hf_folder(rank.roles["policy"].model.lm, tmp_path, torch.float32, publish=True, shard_bytes=10_000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert rank_of(tmp_path).state_hash() == rank.state_hash()


def test_an_empty_batch_is_allowed(tiny):
    rank = rank_of(tiny["llama"])
    assert rank.forward(TrainBatch(samples=[]), "policy", frozenset({"logprobs"})) == {"logprobs": []}
