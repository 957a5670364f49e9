"""Conversions of strangers' tokenizers and chat templates, whole: what is written, said and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.nemo_archive import NEMO, gpt_config, gpt_state, write_nemo
from support.measurements.tokenizer_directories import IDENTITY, START, STOP, byte_pairs, pieces
from support.tiny_models.huggingface_models import save, write_tokenizer
from support.tiny_models.t5_models import huggingface_t5
from tokenizers import Tokenizer, models

from deployment.openai.texts.templates import ChatTemplate
from deployment.openai.texts.texts import load_texts
from export_scripts.arguments import ConvertArguments
from export_scripts.conversion.plan.check import inspect_source
from export_scripts.convert import convert
from handover.chat import CHAT_FILE, read_chat
from handover.errors import ArtefactError, CheckpointError
from handover.text_ids import TextIds, read_text_ids

DIALOGUE = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
TURNS = [{"role": "user", "content": "hello world"}, {"role": "assistant", "content": "boat"}]


def source(folder: Path, files: dict[str, Any], **config: Any) -> Path:
    save("gpt2", folder, tokenizer=False)
    content = {**files, **({"tokenizer_config.json": config} if config else {})}
    for name, each in content.items():
        (folder / name).write_bytes(each if isinstance(each, bytes) else json.dumps(each).encode())
    return folder


def shards(path: Path, output: Path, **more: Any) -> Path:
    convert(ConvertArguments(path, output, 1, "fp32", processes=1, **more))
    return output


def conversation(folder: Path) -> tuple[str, tuple[int, ...]]:
    texts = load_texts(folder, 0, 1, False)
    template = ChatTemplate(read_chat(folder), folder, texts.tokenizer.encode)
    rendered = template.render(TURNS)
    return rendered, template.encode(rendered)


def test_an_end_token_that_the_class_has_by_default_stands_between_turns(tmp_path: Path) -> None:
    path = source(tmp_path / "m", byte_pairs(), model_max_length=64, chat_template=DIALOGUE)
    rendered, ids = conversation(shards(path, tmp_path / "out"))
    assert rendered == "hello world<|endoftext|>boat<|endoftext|>"
    assert ids.count(0) == 2 and ids[-1] == 0


def test_added_tokens_beside_a_sentencepiece_model_are_themselves(tmp_path: Path) -> None:
    template = f"{{% for m in messages %}}{START}{{{{ m.content }}}}{STOP}{{% endfor %}}"
    files = {"tokenizer.model": pieces(**IDENTITY), "added_tokens.json": {STOP: 340, START: 341}}
    names = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": STOP, "chat_template": template}
    out = shards(source(tmp_path / "m", files, add_bos_token=True, **names), tmp_path / "out")
    ids = conversation(out)[1]
    assert [each for each in ids if each >= 340] == [341, 340, 341, 340]
    assert load_texts(out, 0, 1, False).decode([341, 340]) == START + STOP
    assert read_text_ids(out) == TextIds(before=(1,))  # the id that the model of pieces has


def test_the_chat_goes_along_to_another_cut(tmp_path: Path) -> None:
    first = shards(source(tmp_path / "m", byte_pairs(), chat_template=DIALOGUE), tmp_path / "1-gpu")
    convert(ConvertArguments(first, tmp_path / "2-gpu", 2, "fp32", processes=1))
    assert read_chat(tmp_path / "2-gpu") == read_chat(first)
    assert conversation(tmp_path / "2-gpu") == conversation(first)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"chat_template": "\ud800"}, "chat_template has half a character"),
        ({"chat_template": DIALOGUE, "eos_token": "\udc00"}, "surrogate"),
        ({"chat_template": 5}, "chat_template is 5, not a text"),
    ],
)
def test_what_is_no_template_is_refused_before_anything_is_written(
    config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = source(tmp_path / "m", byte_pairs(), **config)
    with pytest.raises(CheckpointError, match=words):
        shards(path, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*")) if (tmp_path / "out").exists() else True


@pytest.mark.parametrize("template", ["{% foreign %}", "{% for a in b %}" * 25 + "{% endfor %}" * 25])
def test_a_template_that_cannot_be_used_is_said_and_leaves_completions(
    template: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shards(source(tmp_path / "m", byte_pairs(), chat_template=template), tmp_path / "out")
    assert "the chat template cannot be used, so that the endpoint will refuse conversations" in capsys.readouterr().err
    with pytest.raises(ArtefactError, match="the chat template of .* cannot be used"):
        conversation(out)
    assert load_texts(out, 0, 1, False).encode("hello world")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"tokenizer.model": b""}, "has no pieces"),
        ({"spiece.model": b""}, "has no pieces"),
        ({"sentencepiece.bpe.model": b""}, "begins with"),
        ({"vocab.json": {}, "merges.txt": b""}, "has no token"),
        ({"vocab.json": {"a": 2**32 + 3}, "merges.txt": b""}, "the id 4294967299, which is not"),
        ({"vocab.json": {"a": -1}, "merges.txt": b""}, "a is -1, not a whole number"),
        ({"vocab.json": {"a": 0}, "merges.txt": b"", "added_tokens.json": {"<b>": 7}}, "the id 7 in the files"),
    ],
)
def test_vocabularies_that_are_none_are_refused(files: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        inspect_source(source(tmp_path / "m", files), 1, "fp32")


@pytest.mark.parametrize("number", [2**32 + 3, 2**31, -1])
@pytest.mark.parametrize("place", ["vocab", "added_tokens"])
def test_an_id_that_no_model_has_is_refused(number: int, place: str, tmp_path: Path) -> None:
    description = json.loads(Tokenizer(models.BPE({"a": 0, "b": 1}, [])).to_str())
    if place == "vocab":
        description["model"]["vocab"]["b"] = number
    else:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        description["added_tokens"] = [{"id": number, "content": "<b>", "special": True, **flags}]
    with pytest.raises(CheckpointError):
        inspect_source(source(tmp_path / "m", {"tokenizer.json": description}), 1, "fp32")


def test_an_empty_sentencepiece_model_of_nemo_is_refused(tmp_path: Path) -> None:
    config = gpt_config(tokenizer={**gpt_config()["tokenizer"], "library": "sentencepiece", "model": "nemo:t.model"})
    files = {"t.model": b""}
    path = write_nemo(tmp_path / "gpt.nemo", config, {"model_weights.ckpt": gpt_state()}, files=files)
    with pytest.raises(CheckpointError, match="tokenizer.model is empty"):
        inspect_source(path, 1, "fp32")


def test_t5s_marks_for_gaps_are_tokens_without_tokenizer_json(tmp_path: Path) -> None:
    huggingface_t5(vocab_size=200).save_pretrained(tmp_path / "m")
    model = pieces("unigram", pad_id=0, eos_id=1, unk_id=2, bos_id=-1, byte_fallback=False, vocab_size=90)
    (tmp_path / "m/spiece.model").write_bytes(model)
    texts = load_texts(shards(tmp_path / "m", tmp_path / "out"), 0, 1, True)
    ids = texts.encode("the <extra_id_0> boat")
    assert len([each for each in ids if each >= 90]) == 1 and ids[-1] == 1


def test_links_of_a_given_tokenizer_lead_nowhere_else(tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.mkdir()
    write_tokenizer(given)
    (tmp_path / "secret").write_text("of another")
    (given / "chat_template.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"chat_template.jinja is a link to .*/secret"):
        shards(NEMO / "gpt_spm.nemo", tmp_path / "out", tokenizer=given)
    (given / "chat_template.jinja").unlink()
    (given / "chat_template.jinja").write_text("{{ eos_token }}")
    assert json.loads((shards(NEMO / "gpt_spm.nemo", tmp_path / "out", tokenizer=given) / CHAT_FILE).read_bytes())
