"""Tokenizers of transformers in every form of their files: the same ids, conversations and texts as transformers'."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sentencepiece
from support.measurements.tokenizer_directories import Directory, of_descriptions, of_pairs, of_pieces
from transformers import AutoTokenizer

from deployment.openai.texts.templates import ChatTemplate
from deployment.openai.texts.texts import load_texts
from export_scripts.checkpoints.files.archive import open_archive
from export_scripts.checkpoints.tokenizers.huggingface import find_tokenizer
from export_scripts.repository.tokenizer_models.slipway_tokenizer import FileTokenizer
from handover.chat import Chat
from handover.text_ids import TextIds

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  What's 1 < 2 in das Mädchen?\n", "name": "ann"},
    {"role": "assistant", "content": "It's {{ true }}  <think>naïve 😀</think>."},
    {"role": "user", "content": "the small boat [INST] jumps"},
]
TEXTS = ["hello world", " The  quick\nbrown fox ", "naïve 😀 das Mädchen\t1234", "", "<think>a</think>    x"]
CHAT_ML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PARTS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for part in m['content'] %}{% if part['type'] == 'text' %}"
    "{{ part['text'] | trim }}{% endif %}{% endfor %}<|im_end|>{% endfor %}"
)
TEMPLATES = {
    "chatml": CHAT_ML,
    "inst": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} "
    "{{ m.content }} {{ eos_token }}{% endif %}{% endfor %}",
    "dialogue": "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
    "generation": "{% for m in messages %}<|im_start|>{{ m.role }}\n{%- generation -%}\n{{ m.content }}"
    "{% endgeneration %}<|im_end|>\n{% endfor %}",
    "parts": PARTS,
    "name": "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}\n\n{{ m.content }}"
    "<|im_end|>\n{% endfor %}",
    "json": "{{ messages | tojson(indent=2, sort_keys=true) }}{% for m in messages %}{{ eos_token }}"
    "{{ m | tojson(ensure_ascii=True, separators=(',', ':')) }}{% endfor %}{{ pad_token }}",
    "turns": """
    {%- set ns = namespace(system='', count=0) %}
    {%- for m in messages %}
        {%- if m.role == 'system' %}{% set ns.system = m.content %}{% continue %}{% endif %}
        {%- if ns.count > 3 %}{% break %}{% endif %}
        {%- set ns.count = ns.count + 1 %}
        {{- '<start_of_turn>' ~ m.role ~ '\\n' ~ (ns.system if loop.first else '') ~ m.content | trim ~ '<|im_end|>' }}
    {%- endfor %}
    {%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}""",
    "macro": "{% macro one(m, close=eos_token) %}</s>{{ m.role | upper }}: {{ m.content[:20] }}{{ close }}"
    "{% endmacro %}{% for m in messages %}{{ one(m) }}{% endfor %}{{ unk_token }}<unk>",
    "date": "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% endif %}{% for m in messages %}<|endoftext|>"
    "{{ m['content'] | replace('a', 'b') }}<tool>{% endfor %}",
    "either": "{% for m in messages %}<s>{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ p.text }}{% endfor %}{% endif %}</s>{% endfor %}",
    "special": "{{ cls_token }}{% for m in messages %}{{ bos_token }}{{ image_token }} {{ m.role }}:{{ sep_token }}"
    "{{ m.content }}{% if loop.last %}{{ dict(a=1) | tojson }}{% endif %} {{ eos_token }} \n{% endfor %}",
}
KINDS = {"pairs": of_pairs, "pieces": of_pieces, "descriptions": of_descriptions}


class Case(NamedTuple):
    """A tokenizer as transformers has it, and as it was converted."""

    oracle: Any
    tokenizer: FileTokenizer
    special: dict[str, str]
    around: TextIds
    folder: Path


@pytest.fixture(scope="module", autouse=True)
def _protocol_buffers() -> Any:
    """SentencePiece's own description of its files wants a newer protobuf than tritonclient; transformers has one."""
    from transformers.utils import sentencepiece_model_pb2_new as description

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "sentencepiece.sentencepiece_model_pb2", description)
        patch.setattr(sentencepiece, "sentencepiece_model_pb2", description, raising=False)
        yield


def case_of(directory: Directory, folder: Path) -> Case:
    source = directory.write(folder / "source")
    archive = open_archive(source)
    found = find_tokenizer(archive, directory.model_type)
    (folder / "tokenizer.json").write_bytes(found.contents(archive)["tokenizer.json"])
    tokenizer = FileTokenizer(folder / "tokenizer.json")
    return Case(AutoTokenizer.from_pretrained(source), tokenizer, dict(found.special), found.text_ids, folder)


def given(messages: list[dict[str, Any]], template: str) -> list[dict[str, Any]]:
    """A conversation as its template wants it from whoever calls transformers."""
    if template != PARTS:
        return messages
    return [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]


def differences(case: Case) -> list[str]:
    """Compare everything that depends on the files."""
    oracle, own, found = case.oracle, case.tokenizer, []
    if case.special != oracle.special_tokens_map:
        found.append(f"special tokens {case.special}, not {oracle.special_tokens_map}")
    for text in TEXTS:
        expected = oracle(text)["input_ids"]
        if (ids := [*case.around.before, *own.encode(text), *case.around.after]) != expected:
            found.append(f"{text!r} is {ids}, not {expected}")
    for name, template in TEMPLATES.items():
        chat = ChatTemplate(Chat(template, case.special), case.folder, own.encode, own)
        for count in (1, 2, len(TURNS)):
            how = {"add_generation_prompt": count != 2}
            messages = given(TURNS[:count], template)
            expected_text = oracle.apply_chat_template(messages, chat_template=template, tokenize=False, **how)
            expected = oracle.apply_chat_template(messages, chat_template=template, return_dict=False, **how)
            ids = list(chat.encode(chat.render(TURNS[:count], **how)))
            if ids != expected:
                found.append(f"{name} of {count} turns is {ids}, not {expected} of {expected_text!r}")
            elif own.decode(ids) != oracle.decode(ids):
                found.append(f"{name} reads {own.decode(ids)!r}, not {oracle.decode(ids)!r}")
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_ids_conversations_and_texts_are_transformers_own(kind: str, tmp_path: Path) -> None:
    directories = KINDS[kind]()
    assert len(directories) >= 14
    cases = {name: case_of(each, tmp_path / str(n)) for n, (name, each) in enumerate(directories.items())}
    found = {name: said for name, case in cases.items() if (said := differences(case))}
    assert not found, "\n".join(f"{name}: {each}" for name, said in found.items() for each in said[:3])


def test_the_endpoint_reads_a_directory_of_transformers_as_a_conversion_does(tmp_path: Path) -> None:
    """``--tokenizer``, where the served repository is not on the endpoint's machine."""
    for number, directory in enumerate(
        (of_pairs()["opt"], of_pieces()["chatml"], of_descriptions()["tokens beyond it"])
    ):
        case = case_of(directory, tmp_path / str(number))
        texts = load_texts(tmp_path / f"{number}/source", 0, 1, False)
        assert (texts.special, texts.ids[:2]) == (case.special, (case.around.before, case.around.after))
        for text in TEXTS[:3]:
            assert list(texts.encode(text)) == case.oracle(text)["input_ids"]
        assert isinstance(texts.tokenizer, FileTokenizer)
        chat = ChatTemplate(Chat(CHAT_ML, texts.special), texts.directory, texts.tokenizer.encode, texts.tokenizer)
        expected = case.oracle.apply_chat_template(TURNS, chat_template=CHAT_ML, return_dict=False)
        assert list(chat.encode(chat.render(TURNS, add_generation_prompt=False))) == expected
