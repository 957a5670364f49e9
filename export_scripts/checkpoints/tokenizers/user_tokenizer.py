"""A tokenizer that the user gives, in the place of the checkpoint's own or of one that only its name stands for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.huggingface.files import read_json
from export_scripts.checkpoints.tokenizers import tiktoken
from export_scripts.checkpoints.tokenizers.assembled import whole
from export_scripts.checkpoints.tokenizers.nemo import TokenizerFiles, tiktoken_files
from handover.errors import CheckpointError
from handover.text_ids import TextIds

FOLDER = "given_tokenizer"
"""Folder of its files in a checkpoint's archive."""
# What is looked for, the best first: tokenizer.json alone knows of tokens that were added to a vocabulary.
OF_TRANSFORMERS = frozenset(("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"))
"""Files by which transformers' tokenizers are known."""
_FORMS = (
    ("huggingface", ("tokenizer.json",)),
    ("sentencepiece", ("tokenizer.model",)),
    ("bpe", ("vocab.json", "merges.txt")),
)


def given_tokenizer(archive: Archive) -> TokenizerFiles | None:
    """Find the tokenizer that the user gave; None: there is none.

    Raises:
        CheckpointError: its files are of no form that is read.
    """
    names = sorted(name.removeprefix(f"{FOLDER}/") for name in archive.sizes if name.startswith(f"{FOLDER}/"))
    found = tokenizer_in(archive, f"{FOLDER}/")
    if names and found is None:
        raise CheckpointError(
            f"export.model.tokenizer holds {', '.join(names)}, and no tokenizer that is read",
            "tokenizer.json (with tokenizer_config.json), tokenizer.model, vocab.json with merges.txt, or NeMo's JSON "
            "list of a tiktoken vocabulary are",
        )
    return found


def tokenizer_in(archive: Archive, folder: str) -> TokenizerFiles | None:
    """Find a tokenizer's files in a folder, the whole of it; None: there are none of a form that is read.

    Args:
        archive: the files.
        folder: with a slash at its end; empty: the root.
    """
    inside = {name.removeprefix(folder): name for name in archive.sizes if name.startswith(folder)}
    names = {short: name for short, name in inside.items() if "/" not in short}
    for library, wanted in _FORMS:
        if all(name in names for name in wanted):
            found = TokenizerFiles({name: names[name] for name in wanted}, library)
            if library == "huggingface" and not _says_more(archive, names):
                return found
            # Nothing is put around a text: training with NeMo or Megatron put nothing there either.
            return replace(whole(archive, found, ""), text_ids=TextIds()) if names.keys() & OF_TRANSFORMERS else found
    models = [name for name in names.values() if name.endswith(".model")]
    if len(models) == 1:
        return TokenizerFiles({"tokenizer.model": models[0]}, "sentencepiece")
    descriptions = [name for name in names.values() if name.endswith(".json")]
    lists = [name for name in descriptions if tiktoken.is_vocabulary(archive.read_bytes(name))]
    return tiktoken_files(lists[0]) if len(lists) == 1 else None


def _says_more(archive: Archive, names: Mapping[str, str]) -> bool:
    """Whether files beside a ``tokenizer.json`` have tokens that it lacks, or a template that may name some."""
    if names.keys() & {"added_tokens.json", "chat_template.jinja", "chat_template.json"}:
        return True
    config = names.get("tokenizer_config.json")
    return config is not None and not {"added_tokens_decoder", "chat_template"}.isdisjoint(read_json(archive, config))


def refuse_unused(archive: Archive, tokenizer: TokenizerFiles) -> None:
    """Make sure that a given tokenizer is the one that was taken.

    Raises:
        CheckpointError: the checkpoint's format keeps its own.
    """
    is_given = any(name.startswith(f"{FOLDER}/") for name in archive.sizes)
    if is_given and not any(member.startswith(f"{FOLDER}/") for member in tokenizer.members.values()):
        raise CheckpointError(
            f"export.model.tokenizer is not taken for {archive.path}: the tokenizer of this format is a part of it",
            "leave export.model.tokenizer out",
        )
