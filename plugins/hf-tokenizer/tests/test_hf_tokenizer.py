"""Tiny byte-level tokenizers made here; the templates are those shapes that the field uses."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as RawTokenizer

from miles_core import BuildContext, Environment
from miles_core.errors import ConfigError, DataError
from miles_hf_tokenizer import HfTokenizerConfig, miles_tokenizers
from miles_hf_tokenizer.tokenizer import HfTokenizer, read_template

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nDefault.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRIMMING = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TOOLS = "{% for t in tools %}{{ t['function']['name'] }};{% endfor %}{% for m in messages %}{{ m['content'] }}{% endfor %}"


def make(
    folder: Path, template: str | None = CHATML, *, bos: str | None = None, adds_bos: bool = False, eos: object = 2
) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = RawTokenizer(models.BPE({token: i for i, token in enumerate([*SPECIAL, *alphabet])}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    if adds_bos:
        raw.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, SPECIAL.index(bos))])
    folder.mkdir(exist_ok=True)
    raw.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    if bos:
        config["bos_token"] = bos
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    if eos is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    return folder


def say(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def test_a_prompt_ends_where_the_assistant_starts_to_speak(tmp_path: Path) -> None:
    prompt = HfTokenizer(make(tmp_path)).render(say(("system", "S"), ("user", "hi")))
    assert prompt.text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.token_ids.dtype == np.int32
    assert prompt.token_ids[0] == 1  # <|im_start|> is one id, not its characters


@pytest.mark.parametrize("opened", ["a + b =", "3 + 4 = ", "", "hi", "\n", "<|im_end|>\n"])
@pytest.mark.parametrize("template", [CHATML, TRIMMING])
def test_an_opened_answer_ends_the_prompt_after_its_text(tmp_path: Path, opened: str, template: str) -> None:
    # "hi" also occurs in the user's turn, and TRIMMING would cut the white space that an opened answer ends with.
    prompt = HfTokenizer(make(tmp_path, template, bos="<s>")).render(say(("user", "hi"), ("assistant", opened)))
    head = {CHATML: "<|im_start|>assistant\n", TRIMMING: "[assistant]"}[template]
    shown = opened if template == CHATML else opened.lstrip()
    assert prompt.text.endswith("<|im_end|>" + "\n" * (template == CHATML) + head + shown)


def test_an_empty_system_message_is_respected(tmp_path: Path) -> None:
    tokenizer = HfTokenizer(make(tmp_path))
    assert tokenizer.render(say(("user", "x"))).text.startswith("<|im_start|>system\nDefault.<|im_end|>")
    assert tokenizer.render(say(("system", ""), ("user", "x"))).text.startswith("<|im_start|>system\n<|im_end|>\n")


@pytest.mark.parametrize(
    ("adds_bos", "template", "text", "num_bos"),
    [
        (True, TRIMMING, "a", 1),  # both the template and the tokenizer bring one
        (True, CHATML, "a", 1),  # only the tokenizer
        (True, TRIMMING, "<s>a", 1),  # the text brings its own
        (False, CHATML, "a", 0),  # the model has none
    ],
)
def test_exactly_one_bos_where_the_model_has_one(
    tmp_path: Path, adds_bos: bool, template: str, text: str, num_bos: int
) -> None:
    tokenizer = HfTokenizer(make(tmp_path, template, bos="<s>", adds_bos=adds_bos))
    for prompt in (tokenizer.encode(text), tokenizer.render(say(("user", "a")))):
        assert np.count_nonzero(prompt.token_ids == SPECIAL.index("<s>")) == num_bos
        assert (prompt.token_ids[0] == SPECIAL.index("<s>")) == bool(num_bos)


def test_T9_missing_template_names_the_model_and_the_option(tmp_path: Path) -> None:
    tokenizer = HfTokenizer(make(tmp_path, None))
    with pytest.raises(ConfigError, match=r"\[tokenizer\] chat_template") as caught:
        tokenizer.render(say(("user", "x")))
    assert str(tmp_path) in str(caught.value)


def test_T9_plain_text_needs_no_template(tmp_path: Path) -> None:
    tokenizer = HfTokenizer(make(tmp_path, None))
    assert tokenizer.decode(tokenizer.encode("plain é").token_ids) == "plain é"
    assert tokenizer.template_hash == hashlib.sha256(b"").hexdigest()


def test_T9_a_supplied_template_is_in_force_and_hashed(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text("<{{ messages[0]['content'] }}>")
    tokenizer = HfTokenizer(make(tmp_path / "m"), chat_template=read_template(f"file:{path}"))
    assert tokenizer.render(say(("user", "x"))).text == "<x>"
    assert tokenizer.template_hash == hashlib.sha256(path.read_bytes()).hexdigest()
    assert HfTokenizer(tmp_path / "m").template_hash == hashlib.sha256(CHATML.encode()).hexdigest()


@pytest.mark.parametrize("option", ["file:/no/such/template.jinja", "template.jinja"])
def test_a_template_option_that_is_none_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match="chat_template"):
        read_template(option)


def test_tools_reach_the_template(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
    assert HfTokenizer(make(tmp_path, TOOLS)).render(say(("user", "x")), tools=(tool,)).text == "add;x"


def test_template_options_reach_the_template(tmp_path: Path) -> None:
    tokenizer = HfTokenizer(make(tmp_path, "{{ thinking }}"), template_options={"thinking": "off"})
    assert tokenizer.render(say(("user", "x"))).text == "off"


def test_a_template_that_refuses_the_messages_is_a_data_error(tmp_path: Path) -> None:
    tokenizer = HfTokenizer(make(tmp_path, "{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(DataError, match="roles must alternate"):
        tokenizer.render(say(("user", "x"), ("user", "y")))


@pytest.mark.parametrize(
    ("template", "eos", "ids"),
    [(None, None, (0,)), (CHATML, None, (0, 2)), (None, [2, 3], (0, 2, 3)), ("{{ messages[0]['content'] }}", 0, (0,))],
)
def test_stops_come_from_generation_config_tokenizer_and_template(
    tmp_path: Path, template: str | None, eos: object, ids: tuple[int, ...]
) -> None:
    assert HfTokenizer(make(tmp_path, template, eos=eos)).stop_token_ids == ids


def test_decode_shows_or_skips_special_tokens(tmp_path: Path) -> None:
    tokenizer = HfTokenizer(make(tmp_path))
    ids = tokenizer.encode("hi<|im_end|>").token_ids
    assert (tokenizer.decode(ids), tokenizer.decode(ids, skip_special=False)) == ("hi", "hi<|im_end|>")
    assert tokenizer.vocab_size == 256 + len(SPECIAL)


def test_component_builds_from_the_model_folder_and_checks_it(tmp_path: Path) -> None:
    (component,) = miles_tokenizers()
    run = SimpleNamespace(tokenizer=SimpleNamespace(chat_template=None))
    context = BuildContext(
        component="tokenizer/hf", run_dir=tmp_path, seed=0, run_config=run, model_path=make(tmp_path / "m")
    )
    assert component.build(HfTokenizerConfig(), context).has_template
    with pytest.raises(ConfigError, match="no tokenizer in"):
        component.check(HfTokenizerConfig(), Environment(model_path=tmp_path, run_config=run))
