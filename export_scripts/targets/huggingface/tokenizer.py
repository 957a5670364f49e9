"""The tokenizer's files of a Hugging Face directory, such that ``AutoTokenizer`` gives the ids that training had.

What a directory of Hugging Face has is copied. A tokenizer that Hugging Face's library does not read as it is, GPT-2's
two files or a SentencePiece model, is described in ``tokenizer.json`` as well; the files themselves are kept, so that
the directory is as good a source as the checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.source import Source
from export_scripts.checkpoints.tokenizers.nemo import sentencepiece_additions
from export_scripts.checkpoints.tokenizers.pieces import read_pieces
from export_scripts.checkpoints.tokenizers.vocabularies import end_of_text
from export_scripts.targets.huggingface.sentencepiece_json import describe
from handover.chat import TOOL_USE_FILE
from handover.text_ids import TextIds

_DESCRIPTION, _CONFIG = "tokenizer.json", "tokenizer_config.json"
_CHAT = "chat_template.jinja"
_BESIDE = (_CONFIG, "special_tokens_map.json", "added_tokens.json", _CHAT, "chat_template.json")
_OWN = (
    *(_DESCRIPTION, "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model"),
    *("sentencepiece.bpe.model", "gpt2-vocab.json", "gpt2-merges.txt", *_BESIDE),
)
_CLASS = "PreTrainedTokenizerFast"
_SENTINELS = 100
"""Tokens ``<extra_id_N>`` that every published T5 has after its pieces."""


def tokenizer_files(source: Source, sizes: Mapping[str, int]) -> dict[str, bytes]:
    """Return the files by name; none where the checkpoint has no tokenizer.

    Args:
        source: the checkpoint, its ids settled.
        sizes: what the model says of a text's length: ``model_max_length``, or nothing.

    Raises:
        CheckpointError: a file is damaged.
    """
    archive, tokenizer = source.archive, source.tokenizer
    if source.own is not None and not any("/" in member for member in tokenizer.members.values()):
        given = {name: archive.read_bytes(name) for name in _OWN if name in archive}
        if given:
            return _with_tool_use(given, archive, "")
    files = tokenizer.contents(archive)
    if not files:
        return {}
    if _DESCRIPTION in files:
        description = json.loads(files[_DESCRIPTION])
        folder = next(iter(tokenizer.members.values())).rpartition("/")[0]
        folder = f"{folder}/" if folder else ""
        files = _with_tool_use(files | _beside(archive, folder), archive, folder)
    else:
        description = _described(source, files)
        files[_DESCRIPTION] = json.dumps(description, ensure_ascii=False).encode()
    if _CONFIG not in files:
        config = {"tokenizer_class": _CLASS, **_special_tokens(source, description), **sizes}
        config["clean_up_tokenization_spaces"] = False
        files[_CONFIG] = json.dumps(config, indent=2, ensure_ascii=False).encode()
    if source.chat_template and not _has_template(files):
        files[_CHAT] = source.chat_template.encode()
    return files


def _has_template(files: Mapping[str, bytes]) -> bool:
    """Whether a tokenizer's own files say how a conversation is written."""
    return any(name.startswith("chat_template.") for name in files) or "chat_template" in json.loads(files[_CONFIG])


def _beside(archive: Archive, folder: str) -> dict[str, bytes]:
    return {name: archive.read_bytes(folder + name) for name in _BESIDE if folder + name in archive}


def _with_tool_use(files: dict[str, bytes], archive: Archive, folder: str) -> dict[str, bytes]:
    """Move a template that lies in a folder of its own, which a model's directory has not, to the configuration."""
    if folder + TOOL_USE_FILE not in archive or _CHAT not in files:
        return files
    config = json.loads(files.get(_CONFIG, b"{}"))
    templates = {"default": files[_CHAT], "tool_use": archive.read_bytes(folder + TOOL_USE_FILE)}
    config["chat_template"] = [{"name": name, "template": text.decode()} for name, text in templates.items()]
    others = {name: content for name, content in files.items() if name != _CHAT}
    return {**others, _CONFIG: json.dumps(config, indent=2, ensure_ascii=False).encode()}


def _described(source: Source, files: Mapping[str, bytes]) -> dict[str, Any]:
    """Describe GPT-2's files or a SentencePiece model; transformers' T5 puts its end token behind every text."""
    around = source.tokenizer.text_ids
    if "tokenizer.model" in files:
        model = files["tokenizer.model"]
        pieces = read_pieces(model)
        is_t5 = source.family.is_encoder_decoder and not source.tokenizer.is_nemos
        added = sentencepiece_additions(model, source.tokenizer.is_legacy) if source.tokenizer.is_nemos else {}
        added |= {token: len(pieces.tokens) + len(added) + n for n, token in enumerate(source.added_tokens)}
        content = describe(pieces, _sentinels(source, len(pieces.tokens)) if is_t5 else added)
        if is_t5:
            around = replace(around, after=around.after or (source.ids.end_id,))
    else:
        content = _byte_pairs(json.loads(files["vocab.json"]), files["merges.txt"].decode())
    content["post_processor"] = _template(around, content) or content["post_processor"]
    return content


def _sentinels(source: Source, first_id: int) -> dict[str, int]:
    """Name the sentinels that T5's embedding has rows for; their numbers go down while ids go up."""
    if source.dims.axis_size("vocab_size") < first_id + _SENTINELS:
        return {}
    return {f"<extra_id_{number}>": first_id + _SENTINELS - 1 - number for number in range(_SENTINELS)}


def _byte_pairs(vocabulary: dict[str, int], merges: str) -> dict[str, Any]:
    token, number = end_of_text(vocabulary)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    pairs = [line.split(" ") for line in merges.splitlines() if line.strip() and not line.startswith("#version")]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": token, **flags}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": {**byte_level, "trim_offsets": False},
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocabulary,
            "merges": pairs,
        },
    }


def _template(around: TextIds, description: Mapping[str, Any]) -> dict[str, Any] | None:
    """Describe what stands around a text's own tokens; None: nothing does."""
    if not (around.before or around.after):
        return None
    names = _names(description)
    used = {names[number]: number for number in (*around.before, *around.after)}

    def special(number: int, kind: int = 0) -> dict[str, Any]:
        return {"SpecialToken": {"id": names[number], "type_id": kind}}

    def text(name: str, kind: int) -> list[dict[str, Any]]:
        inner = {"Sequence": {"id": name, "type_id": kind}}
        return [*(special(n, kind) for n in around.before), inner, *(special(n, kind) for n in around.after)]

    return {
        "type": "TemplateProcessing",
        "single": text("A", 0),
        "pair": [*text("A", 0), *text("B", 1)],
        "special_tokens": {token: {"id": token, "ids": [n], "tokens": [token]} for token, n in used.items()},
    }


def _names(description: Mapping[str, Any]) -> dict[int, str]:
    """Name every id of a description."""
    vocabulary = description["model"]["vocab"]
    if isinstance(vocabulary, list):
        names = {number: str(entry[0]) for number, entry in enumerate(vocabulary)}
    else:
        names = {int(number): token for token, number in vocabulary.items()}
    return {**names, **{int(entry["id"]): entry["content"] for entry in description.get("added_tokens") or ()}}


def _special_tokens(source: Source, description: Mapping[str, Any]) -> dict[str, str]:
    """Name the special tokens, as far as the vocabulary has them."""
    names, ids = _names(description), source.ids
    wanted = {"bos_token": ids.start_id, "eos_token": ids.end_id, "pad_token": ids.pad_id}
    return {key: names[number] for key, number in wanted.items() if number is not None and number in names}
