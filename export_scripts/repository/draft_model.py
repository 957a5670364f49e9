"""What drafts beside a repository's model: a small model of the same vocabulary, or an EAGLE-3 head."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from export_scripts.arguments import EAGLE3, ExportArguments
from export_scripts.repository.checkpoint import ServedCheckpoint
from handover.digests import file_digest
from handover.errors import ArtefactError
from handover.manifest import FILE_NAME as MANIFEST_NAME
from handover.manifest import FileRecord, Manifest
from models.described import find_model_tensors, read_directory
from models.directory import CONFIG_FILE, GENERATION_FILE, find_tensors
from models.eagle3 import read_eagle3
from models.engine_limits import beyond_engine, draft_model_problem

_HINT = "give a small model of the same family and tokenizer, or leave speculation and draft_model out"
_MOST_LISTED = 5


def draft_files(arguments: ExportArguments, served: ServedCheckpoint) -> tuple[FileRecord, ...]:
    """List the files of the draft model, or of the head, with their digests; empty: there is none.

    Raises:
        ArtefactError: it is not there, is damaged, or does not draft for the model.
    """
    root = arguments.draft_model
    if root is None:
        return ()
    if not (root / CONFIG_FILE).is_file():
        raise ArtefactError(f"draft_model={root} has no {CONFIG_FILE}", "give a Hugging Face directory")
    if arguments.speculation == EAGLE3:
        model = read_directory(served.root, ArtefactError).decoder
        read_eagle3(root, model, arguments.tensor_para_size, ArtefactError)
        return _records(root, {file for file, _ in find_tensors(root, ArtefactError).values()})
    decoder = read_directory(root, ArtefactError).decoder
    problems = beyond_engine(decoder)
    if served.family.is_encoder_decoder:
        problems.append(f"{served.root} is an encoder-decoder, which has no draft model")
    if problem := draft_model_problem(decoder, decoder.vocab_size, served.vocab_size):
        problems.append(problem)
    problems += _vocabulary_problems(root, served)
    if problems:
        raise ArtefactError(f"draft_model={root} does not draft for {served.root}\n  " + "\n  ".join(problems), _HINT)
    return _records(root, {place.file for place in find_model_tensors(root, decoder, ArtefactError).values()})


def _records(root: Path, weights: set[str]) -> tuple[FileRecord, ...]:
    """Return the records of a directory's files of weights and settings."""
    names = sorted({CONFIG_FILE, GENERATION_FILE, *weights})
    known = _recorded(root)
    return tuple(
        known.get(name) or FileRecord(name, (root / name).stat().st_size, file_digest(root / name))
        for name in names
        if (root / name).is_file()
    )


def _recorded(root: Path) -> dict[str, FileRecord]:
    """Return what a conversion has recorded of its files, by name."""
    if not (root / MANIFEST_NAME).is_file():
        return {}
    manifest = Manifest.read(root)
    if problems := manifest.problems(root, check_digests=False):
        raise ArtefactError(f"{root} is not what its manifest says:\n  " + "\n  ".join(problems), "convert again")
    return {record.path: record for record in manifest.files}


def _vocabulary_problems(root: Path, served: ServedCheckpoint) -> list[str]:
    """List how the vocabularies of the draft model and of the model differ."""

    def read(name: str) -> bytes | None:
        if name in served.made:
            return served.made[name]
        return _content(served.root / name)

    model, draft = _vocabularies(read), _vocabularies(lambda name: _content(root / name))
    both = [kind for kind in model if kind in draft]
    if not both:
        kinds = " nor ".join(model) or "none"
        return [f"{root} has no tokenizer that could be compared with the model's: neither {kinds}"]
    ours, theirs = model[both[0]], draft[both[0]]
    differing = [token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)]
    if not differing:
        return []
    shown = ", ".join(
        f"{token!r} is {ours.get(token)} and here {theirs.get(token)}" for token in sorted(differing)[:_MOST_LISTED]
    )
    return [f"{len(differing)} tokens have other ids than in {served.root}: {shown}"]


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _vocabularies(read: Callable[[str], bytes | None]) -> dict[str, dict[str, int]]:
    """Return the ids of a tokenizer's tokens, as each of its files says them; a sentencepiece model's by its bytes."""
    found: dict[str, dict[str, int]] = {}
    if content := read("tokenizer.json"):
        said = json.loads(content)
        found["a vocabulary"] = _ids_of(said["model"]["vocab"]) | {
            each["content"]: each["id"] for each in said.get("added_tokens") or ()
        }
    elif content := read("vocab.json"):
        found["a vocabulary"] = json.loads(content)
    if content := read("tokenizer.model"):
        found["tokenizer.model"] = {hashlib.sha256(content).hexdigest(): 0}
    return found


def _ids_of(vocabulary: Any) -> dict[str, int]:
    """Return the ids of a vocabulary of pieces in order with their scores, or by name."""
    if isinstance(vocabulary, dict):
        return vocabulary
    return {piece: number for number, (piece, _) in enumerate(vocabulary)}
