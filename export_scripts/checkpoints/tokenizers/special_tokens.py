"""Tokens that a Hugging Face tokenizer adds to a text, as its files say.

Rules: transformers 5, ``tokenization_utils_base.py`` (``add_bos_token`` counts only without a ``tokenizer.json``) and
``tokenization_utils_tokenizers.py``; tokenizers, ``processors/*.rs``. A class may have a rule of its own, below.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.huggingface.files import read_json
from export_scripts.weights.values import quoted
from handover.errors import CheckpointError
from handover.text_ids import TextIds

_DESCRIPTION = "tokenizer.json"
_CONFIG_FILES = ("special_tokens_map.json", "tokenizer_config.json")
# Classes that put no tokens before a text whatever tokenizer.json says, and that always put their end token there.
_WITHOUT, _WITH_END = ("GPTNeoXTokenizer",), ("XGLMTokenizer",)
_CLASS_OF = {"gpt_neox": "GPTNeoXTokenizer", "xglm": "XGLMTokenizer"}
_ADDS = {"LlamaTokenizer": {"add_bos_token": True}}
_XGLM_END = 2  # of fairseq's ids

Added = tuple[tuple[int, ...], tuple[int, ...]]
"""Ids before a text, and behind it."""


def added_tokens(archive: Archive, model_type: str) -> TextIds:
    """Read which tokens stand around a text.

    Raises:
        CheckpointError: a file is damaged, or names a token that the vocabulary lacks.
    """
    config: dict[str, Any] = {}
    for name in _CONFIG_FILES:
        config |= {key: value for key, value in read_json(archive, name).items() if value is not None}
    kind = str(config.get("tokenizer_class") or _CLASS_OF.get(model_type, "")).removesuffix("Fast")
    if kind in _WITHOUT:
        return TextIds()
    if _DESCRIPTION in archive:
        return TextIds(*_added_by(read_json(archive, _DESCRIPTION).get("post_processor"), f"{archive.path}: "))
    if kind in _WITH_END:
        return TextIds(before=(_XGLM_END,))
    adds = {**_ADDS.get(kind, {}), **config}
    before = (_id_of(archive, config, "bos_token"),) if adds.get("add_bos_token") else ()
    after = (_id_of(archive, config, "eos_token"),) if adds.get("add_eos_token") else ()
    return TextIds(before, after)


def _added_by(processor: Any, where: str) -> Added:
    """Read a post-processor, or those that it is a sequence of.

    Raises:
        CheckpointError: it is damaged.
    """
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    try:
        kind = processor["type"] if processor else ""
        if kind == "Sequence":
            for part in processor["processors"]:
                more_before, more_after = _added_by(part, where)
                before, after = (*more_before, *before), (*after, *more_after)
        elif kind in ("RobertaProcessing", "BertProcessing"):
            before, after = (int(processor["cls"][1]),), (int(processor["sep"][1]),)
        elif kind == "TemplateProcessing":
            before, after = _of_template(processor)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise CheckpointError(
            f"{where}{_DESCRIPTION} has a damaged post_processor: {quoted(str(error))}", "copy the checkpoint again"
        ) from error
    return before, after


def _of_template(processor: Mapping[str, Any]) -> Added:
    """Read the template for one text: special tokens around ``$A``."""
    ids: dict[bool, list[int]] = {False: [], True: []}
    is_behind = False
    for piece in processor["single"]:
        if "Sequence" in piece:
            is_behind = True
        else:
            ids[is_behind] += map(int, processor["special_tokens"][piece["SpecialToken"]["id"]]["ids"])
    return tuple(ids[False]), tuple(ids[True])


def _id_of(archive: Archive, config: Mapping[str, Any], key: str) -> int:
    """Find the id of a special token by its name.

    Raises:
        CheckpointError: no file has the token.
    """
    named = config.get(key)
    token = str(named.get("content") if isinstance(named, Mapping) else named)
    known: dict[str, Any] = {**read_json(archive, "vocab.json"), **read_json(archive, "added_tokens.json")}
    added = config.get("added_tokens_decoder")
    for number, entry in added.items() if isinstance(added, Mapping) else ():
        known[str(entry.get("content") if isinstance(entry, Mapping) else entry)] = number
    try:
        return int(known[token])
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(
            f"{archive.path}: tokenizer_config.json puts {key} {quoted(token)} into every text, and no file has its id",
            "put tokenizer.json beside the weights, or mend tokenizer_config.json",
        ) from None
