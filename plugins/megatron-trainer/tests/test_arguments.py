"""`[trainer.megatron.args]` and the model's folder: what `check` refuses, in whose words, before anything loads."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from megatron_support import CONFIGS
from safetensors.torch import load_file, save_file

from miles_core import Environment
from miles_core.errors import ConfigError, RuntimeMissing
from miles_core.settings import RoleTable, TrainerTable
from miles_megatron_trainer import MegatronConfig, arguments, miles_trainers, names

(COMPONENT,) = miles_trainers()


WSD = {"lr_decay_style": "WSD", "lr_wsd_decay_style": "linear"}


def environment(folder, workers=1, roles=None):
    run = SimpleNamespace(
        roles=roles or {},
        steps=10,
        train=SimpleNamespace(minibatches=1, epochs=1),
        trainer=TrainerTable(use="megatron", num_workers=workers),
    )
    return Environment(model_path=folder, run_config=run, where="trainer.megatron")


def resolved(folder, args, workers=1):
    hf = names.read_config(folder, "model.path")
    return arguments.resolve(args, hf, world_size=workers, total_steps=10, where="trainer.megatron")


def test_importing_the_plugin_imports_neither_torch_nor_megatron():
    heavy = "bool({'torch', 'megatron'} & set(sys.modules))"
    code = f"import sys, miles_megatron_trainer as m; m.miles_trainers(); sys.exit({heavy})"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("args", "workers", "message"),
    [
        (
            {"tensor_model_paralel_size": 2},
            2,
            r'trainer.megatron.args.tensor_model_paralel_size: .*\n.*did you mean "tensor_model_parallel_size"',
        ),
        ({"num_layers": 4}, 1, r"args.num_layers: comes from the model's config.json"),
        ({"fp8": "e4m3"}, 1, r"args.fp8: needs Transformer Engine, which is not installed"),
        ({"fp4": "e2m1"}, 1, r"args.fp4: needs Transformer Engine"),
        (
            {"context_parallel_size": 4},
            4,
            r"args.context_parallel_size: 4 does not divide the 2 key-value heads",
        ),
        ({"context_parallel_size": 0}, 1, r"args.context_parallel_size: 0 is not a number of ranks"),
        ({"cp_comm_type": "p2p"}, 1, r"args.cp_comm_type: .* does not honour"),
        ({"num_experts": 4}, 1, r"args.num_experts: .* does not honour"),
        ({"save": "x"}, 1, r"args.save: .* does not honour"),
        (
            {"tensor_model_parallel_size": "two"},
            1,
            r"args: argument --tensor-model-parallel-size: invalid int value: 'two'",
        ),
        ({"lr_decay_style": "steep"}, 1, r"args: argument --lr-decay-style: invalid choice: 'steep'"),
        ({"sequence_parallel": 3}, 1, r"args.sequence_parallel: a switch"),
        ({"lr": True}, 1, r"args.lr: True is not a value of --lr"),
        (
            {"tensor_model_parallel_size": 2},
            3,
            r"2 tensor times 1 pipeline times 1 context ranks do not divide .* = 3",
        ),
        (
            {"tensor_model_parallel_size": 4},
            4,
            r"tensor_model_parallel_size: 4 does not divide the model's 2 key-value heads",
        ),
        ({"pipeline_model_parallel_size": 3}, 3, r"pipeline_model_parallel_size: 3 does not divide the model's 2 layers"),
        ({"pipeline_model_parallel_size": 0}, 1, r"pipeline_model_parallel_size: 0 is not a number of ranks"),
        ({"sequence_parallel": True}, 2, r"sequence_parallel: needs tensor_model_parallel_size above 1"),
        ({"recompute_granularity": "selective"}, 1, r'"selective" is not supported'),
        ({"lr_warmup_iters": 10}, 1, r"args: a warm-up of 10 optimizer steps in a schedule of 10\n.*lr_decay_iters"),
        ({"lr_warmup_fraction": 1.0}, 1, r"args: a warm-up of 10 optimizer steps in a schedule of 10"),
        ({"lr": 1e-3, "min_lr": 1e-2}, 1, r"args.lr: 0.001 is less than min_lr 0.01"),
        ({"lr": 1e-3, "lr_warmup_init": 1e-2}, 1, r"args.lr: 0.001 is less than .* lr_warmup_init 0.01"),
        ({"lr_decay_style": "WSD"}, 1, r'args.lr_decay_style: "WSD" needs lr_wsd_decay_iters'),
        ({"lr_warmup_iters": 2, "lr_warmup_fraction": 0.1}, 1, r"args: .+\n.*so says the installed Megatron"),
        ({"recompute_granularity": "full"}, 1, r"args: .+\n.*so says the installed Megatron"),
    ],
)
def test_bad_arguments_are_refused_with_their_place(tiny, args, workers, message):
    with pytest.raises(ConfigError, match=message):
        COMPONENT.check(MegatronConfig(args=args), environment(tiny["qwen3"], workers))


def test_names_with_dashes_and_switches_that_are_off_are_taken(tiny):
    args = resolved(tiny["qwen3"], {"clip-grad": 0.5, "use_distributed_optimizer": False})
    assert args.clip_grad == 0.5 and args.use_distributed_optimizer is False


def test_defaults_are_those_of_fsdp_and_not_megatrons(tiny):
    """So that a run may change its trainer: learning rate, betas, decay and schedule stay."""
    from miles_fsdp_trainer import FsdpConfig

    args, other = resolved(tiny["qwen3"], {}), FsdpConfig()
    assert (args.lr, args.adam_beta1, args.adam_beta2, args.adam_eps) == (other.lr, *other.betas, other.eps)
    assert (args.weight_decay, args.clip_grad, args.lr_decay_style) == (other.weight_decay, other.grad_clip, other.schedule)


def test_every_honoured_argument_is_one_of_the_installed_megatron():
    known = {action.dest for action in arguments.parser()._actions}
    assert known >= arguments.HONOURED | arguments.FROM_MODEL
    assert not arguments.HONOURED & arguments.FROM_MODEL


def test_C6_the_vocabulary_is_padded_to_a_multiple_over_all_tensor_ranks(tiny):
    sizes = {"tensor_model_parallel_size": 2, "make_vocab_size_divisible_by": 64}
    assert resolved(tiny["qwen3"], sizes, workers=2).padded_vocab_size == 128  # 61, up to a multiple of 2 * 64
    assert resolved(tiny["qwen3"], {}).padded_vocab_size == 61


def test_the_check_leaves_torch_cuda_as_it_was(tiny):
    import torch

    before = {name: getattr(torch.cuda, name) for name in ("Stream", "set_device", "get_device_properties")}
    COMPONENT.check(MegatronConfig(), environment(tiny["llama"]))
    assert before == {name: getattr(torch.cuda, name) for name in before}
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1).cuda()


@pytest.mark.parametrize("role", ["critic", "teacher"])
def test_roles_that_it_does_not_hold_are_refused(tiny, role):
    with pytest.raises(ConfigError, match=rf"roles.{role}: trainer megatron holds a policy and a reference"):
        COMPONENT.check(MegatronConfig(), environment(tiny["llama"], roles={role: RoleTable()}))


def test_a_gpu_that_is_not_there_is_missing_runtime(tiny):
    with pytest.raises(RuntimeMissing, match="sees no GPU"):
        COMPONENT.check(MegatronConfig(device="cuda"), environment(tiny["llama"]))


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        (
            "llama",
            {"architectures": ["MistralForCausalLM"]},
            "trainer megatron has no MistralForCausalLM\n.*LlamaForCausalLM",
        ),
        ("llama", {"attention_bias": True}, "does not support attention biases"),
        ("llama", {"mlp_bias": True}, "does not support MLP biases"),
        ("llama", {"hidden_act": "gelu"}, "does not support the activation gelu"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "scaled rotary positions"),
        ("qwen2", {"use_sliding_window": True}, "does not support sliding-window attention"),
    ],
)
def test_models_whose_mathematics_it_lacks_are_refused(tmp_path, model, change, message):
    config = {**CONFIGS[model].to_dict(), "architectures": ["LlamaForCausalLM" if model == "llama" else "Qwen2ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ConfigError, match=rf"model.path: .*{message}"):
        COMPONENT.check(MegatronConfig(), environment(tmp_path))


def test_a_folder_with_other_tensors_is_refused_and_all_of_them_are_listed(tiny, tmp_path):
    from megatron_support import megatron_rank

    tensors = load_file(tiny["llama"] / "model.safetensors")
    tensors["extra.weight"] = tensors.pop("model.norm.weight").clone()
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((tiny["llama"] / "config.json").read_text())
    with pytest.raises(ConfigError) as refused:
        megatron_rank(tmp_path)
    text = str(refused.value)
    assert "model.path" in text and "missing: model.norm.weight" in text and "unexpected: extra.weight" in text
    assert f"shape of {name}: (47, 32) in the file, (48, 32) in the model" in text


@pytest.mark.parametrize(
    ("args", "rates"),
    [
        ({}, [1, 1, 1, 1]),
        ({"lr_warmup_iters": 2}, [0, 0.5, 1, 1]),  # Megatron's warm-up starts at lr_warmup_init
        ({"lr_warmup_fraction": 0.2, "lr_warmup_init": 0.5}, [0.5, 0.75, 1, 1]),  # two of ten steps
        ({"lr_decay_style": "linear", "lr_decay_iters": 4, "min_lr": 0.2}, [1, 0.8, 0.6, 0.4]),  # 0.2 + 0.8 (1 - k / 4)
        (
            {"lr_decay_style": "WSD", "lr_decay_iters": 4, "lr_wsd_decay_iters": 2, "lr_wsd_decay_style": "linear"},
            [1, 1, 1, 0.5],
        ),
    ],
)
def test_learning_rates_and_weight_decay_of_four_steps(tiny, args, rates):
    from megatron_support import megatron_rank, random_batch

    decay = {"weight_decay_incr_style": "linear", "start_weight_decay": 0.0, "end_weight_decay": 1.0}
    rank = megatron_rank(tiny["llama"], args={"lr": 1.0, "clip_grad": 1e-6, **decay, **args})
    reports, decays = [], []
    for seed in range(4):
        groups = rank.roles["policy"].optimizer.megatron.param_groups
        decays.append(sorted({g["weight_decay"] for g in groups}))
        reports.append(rank.step(random_batch(seed=seed)))
    rank.close()
    assert [r.lr for r in reports] == pytest.approx(rates)
    assert [d[-1] for d in decays] == pytest.approx([0.0, 0.1, 0.2, 0.3])  # from 0 to 1 over the run's ten steps
    assert all(d[0] == 0.0 for d in decays)  # norms and biases never decay
