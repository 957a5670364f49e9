"""Chat templates: those beside a tokenizer are copied, and NeMo 1's chat tokens become one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.llama_configs import nemo1, padded_vocabulary
from support.checkpoints.llama_files import write_archive, write_huggingface_tokenizer
from support.checkpoints.llama_state import core_state
from support.tiny_models.llama_models import save, saved

from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert
from handover.chat import TOOL_USE_FILE, read_chat
from handover.errors import CheckpointError

TOKENS = {
    "system_turn_start": "\x00",
    "turn_start": "\x11",
    "label_start": "\x12",
    "end_of_turn": "\n",
    "end_of_name": ' "says"\n',
}
TURNS = [("User", "What is 1 < 2?"), ("Assistant", "It's {{ true }}.\n"), ("User", "Why?")]
OWN = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"


def model(folder: Path, **data: Any) -> Path:
    source = saved("llama")
    state = core_state(source.tensors, source.config, padded_vocabulary(source.config, 1))
    return write_archive(folder / "model.nemo", nemo1(source.config, data=data), state)


def template_of(path: Path, output: Path, **more: Any) -> Any:
    from transformers import AutoTokenizer

    convert(ConvertArguments(path, output, weight_data_type="fp32", format="huggingface", **more))
    return AutoTokenizer.from_pretrained(output)


def nemos_text(system: str) -> str:
    """What gpt_sft_chat_dataset.py writes and text_generation_server.py asks with, up to the start of an answer."""
    end, name_end = TOKENS["end_of_turn"], TOKENS["end_of_name"]
    conversation = f"{TOKENS['system_turn_start']}System{name_end}{system}{end}"
    for speaker, value in TURNS:
        conversation += TOKENS["turn_start"] + speaker + name_end + value + end
    return f"{conversation}{TOKENS['turn_start']}Assistant{name_end}"


@pytest.mark.parametrize("system", ["", "Be {brief}.\n'Always'."])
def test_nemos_chat_tokens_write_what_training_read(system: str, tmp_path: Path) -> None:
    tokenizer = template_of(model(tmp_path, chat=True, chat_prompt_tokens=TOKENS), tmp_path / "out")
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": speaker.lower(), "content": value} for speaker, value in TURNS]
    made = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert made == nemos_text(system)
    start = f"{TOKENS['turn_start']}Assistant{TOKENS['end_of_name']}"
    assert tokenizer.apply_chat_template(messages, tokenize=False) + start == made


@pytest.mark.parametrize("data", [{"chat": False, "chat_prompt_tokens": TOKENS}, {"chat": True}, {}])
def test_a_model_without_chat_or_tokens_has_no_template(data: dict[str, Any], tmp_path: Path) -> None:
    """The fine-tuning configuration lists the tokens, with ``chat: False``, for every model."""
    tokenizer = template_of(model(tmp_path, **data), tmp_path / "out")
    assert not tokenizer.chat_template
    assert not (tmp_path / "out/chat_template.jinja").exists()


def test_a_token_that_is_missing_is_named(tmp_path: Path) -> None:
    tokens = {key: value for key, value in TOKENS.items() if key != "end_of_name"}
    with pytest.raises(CheckpointError, match=r"data.chat_prompt_tokens.end_of_name is None, not a text"):
        template_of(model(tmp_path, chat=True, chat_prompt_tokens=tokens), tmp_path / "out")


@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.jinja"])
@pytest.mark.parametrize("is_given", [False, True])
def test_a_template_beside_the_tokenizer_is_copied(place: str, is_given: bool, tmp_path: Path) -> None:
    """It takes the place of NeMo's, too."""
    source, given = tmp_path / "source", tmp_path / "given"
    if is_given:
        source = model(tmp_path, chat=True, chat_prompt_tokens=TOKENS)
    else:
        save("llama", source)
        given = source
    write_huggingface_tokenizer(given)
    config = given / "tokenizer_config.json"
    if place == config.name:
        config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": OWN}))
    else:
        (given / place).write_text(OWN)
    tokenizer = template_of(source, tmp_path / "out", tokenizer=given if is_given else None)
    assert (tmp_path / "out" / place).read_bytes() == (given / place).read_bytes()
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == "<user>Hi"


@pytest.mark.parametrize("form", ["huggingface", "fastertransformer"])
def test_a_template_for_tools_comes_along(form: str, tmp_path: Path) -> None:
    """As transformers saves it: in a folder of its own, which no model's directory of ours has."""
    from transformers import AutoTokenizer

    source, output = tmp_path / "source", tmp_path / "out"
    save("llama", source)
    write_huggingface_tokenizer(source)
    saved_there = AutoTokenizer.from_pretrained(source)
    saved_there.chat_template = {"default": OWN, "tool_use": f"tools {OWN}"}
    saved_there.save_pretrained(source)
    assert (source / TOOL_USE_FILE).is_file()
    if form == "huggingface":
        assert template_of(source, output).chat_template == saved_there.chat_template
    else:
        convert(ConvertArguments(source, output, 1, "fp32"))
    assert (read_chat(output).template, read_chat(output).tool_template) == (OWN, f"tools {OWN}")
