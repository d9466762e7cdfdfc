"""The entry module: cheap to import, and `check` finds what is wrong before a model loads."""

import json
import subprocess
import sys
from importlib.resources import files

import pytest
import torch
from fsdp_support import rank_of
from pydantic import ValidationError

import miles_fsdp_trainer
from miles_core import Environment
from miles_core.errors import ConfigError, RuntimeMissing
from miles_fsdp_trainer import FsdpConfig, miles_trainers
from miles_fsdp_trainer.optim import learning_rate

(COMPONENT,) = miles_trainers()


def test_importing_the_plugin_imports_no_torch():
    code = "import sys, miles_fsdp_trainer as m; m.miles_trainers(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_index_names_the_component():
    index = json.loads(files(miles_fsdp_trainer).joinpath("miles-components.json").read_text())
    assert index["components"] == [{"kind": "trainer", "name": COMPONENT.name, "summary": COMPONENT.summary}]


def test_every_option_is_described():
    assert all(field.description for field in FsdpConfig.model_fields.values())


@pytest.mark.parametrize(
    "options", [{"lr": 0.0}, {"learning_rate": 1e-5}, {"dtype": "fp16"}, {"max_tokens": -1}, {"lr": float("nan")}]
)
def test_bad_options_are_refused(options):
    with pytest.raises(ValidationError):
        FsdpConfig(**options)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no config.json"),
        ("{", "is not valid JSON"),
        ("[]", "is not valid JSON"),
        ("{}", 'names no "architectures"'),
    ],
)
def test_check_names_what_is_wrong_with_a_model_folder(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        COMPONENT.check(FsdpConfig(), Environment(model_path=tmp_path))


def test_check_names_a_folder_that_does_not_exist(tmp_path):
    with pytest.raises(ConfigError, match="no folder"):
        COMPONENT.check(FsdpConfig(), Environment(model_path=tmp_path / "nowhere"))


def test_check_passes_a_good_folder(tiny):
    COMPONENT.check(FsdpConfig(), Environment(model_path=tiny["llama"]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_missing_runtime():
    with pytest.raises(RuntimeMissing, match="sees no GPU"):
        COMPONENT.check(FsdpConfig(device="cuda"), Environment())


def test_a_model_that_does_not_load_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["X"], "model_type": "no-such-type"}')
    with pytest.raises(ConfigError, match="does not load as a causal language model"):
        rank_of(tmp_path)


def test_a_model_that_packing_would_get_wrong_is_refused(tiny, monkeypatch):
    from miles_fsdp_trainer import tree

    real = tree.build_tree

    def shifted(sequences, *, share=True):  # positions that go on instead of restarting after the prompt
        result = real(sequences, share=share)
        result.positions = result.positions * 3
        return result

    monkeypatch.setattr("miles_fsdp_trainer.microbatch.build_tree", shifted)
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM gives other log-probabilities packed .*\n.*packing = false"):
        rank_of(tiny["llama"])


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({}, [1, 1, 1, 1, 1, 1]),
        ({"warmup_steps": 2}, [0.5, 1, 1, 1, 1, 1]),
        ({"schedule": "linear"}, [1, 0.8, 0.6, 0.4, 0.2, 0]),  # 5 intervals between 6 steps
        ({"schedule": "linear", "warmup_steps": 1, "min_lr_ratio": 0.2}, [1, 1, 0.8, 0.6, 0.4, 0.2]),
        ({"schedule": "cosine", "warmup_steps": 1}, [1, 1, 0.853553, 0.5, 0.146447, 0]),  # (1 + cos(pi k / 4)) / 2
    ],
)
def test_learning_rates_of_six_steps(options, rates):
    config = FsdpConfig(**options)
    assert [learning_rate(config, 1.0, step, 6) for step in range(6)] == pytest.approx(rates, abs=1e-6)
