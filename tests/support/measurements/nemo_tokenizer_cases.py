"""Tokenizers of NeMo checkpoints, and what our own code says of each; what NeMo says is in tests/data."""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sentencepiece

from export_scripts.checkpoints.files.archive import open_archive
from export_scripts.checkpoints.tokenizers.nemo import TokenizerFiles, special_ids, vocabulary_size
from export_scripts.repository.tokenizer_models.slipway_tokenizer import load_tokenizer
from support.checkpoints.nemo_archive import DATA, NEMO

RECORDED = DATA / "nemo_tokenizers.json"
TEXTS = (
    "",
    "Hello world",
    "  two spaces,\ttab\nnewline  ",
    "naïve café — 東京 🚢",
    "x y xy 12345 don't",
    "The ship left the harbour at noon; nobody waved.",
)


@dataclass(frozen=True)
class Case:
    """One tokenizer.

    Attributes:
        library: bpe or sentencepiece.
        archive: of tests/data/nemo that holds its files; empty: trained here with ``options``.
        is_legacy: NeMo's sentencepiece_legacy.
        has_end_of_text: whether the vocabulary keeps its <|endoftext|>.
        options: of SentencePiece's trainer.
    """

    library: str
    archive: str = ""
    is_legacy: bool = False
    has_end_of_text: bool = True
    options: dict[str, Any] = field(default_factory=dict)


_MISSING = {"bos_id": -1, "eos_id": -1, "pad_id": -1}
CASES = {
    "bpe": Case("bpe", "gpt122_tp1_pp1.nemo"),
    "bpe without <|endoftext|>": Case("bpe", "gpt122_tp1_pp1.nemo", has_end_of_text=False),
    "sentencepiece": Case("sentencepiece", "gpt_spm.nemo"),
    "sentencepiece, legacy": Case("sentencepiece", "gpt_spm.nemo", is_legacy=True),
    "legacy, no special tokens": Case("sentencepiece", is_legacy=True, options=_MISSING),
    "legacy, end alone": Case("sentencepiece", is_legacy=True, options={**_MISSING, "eos_id": 1}),
    "legacy, begin is 0": Case("sentencepiece", is_legacy=True, options={"bos_id": 0, "unk_id": 3, "eos_id": 1}),
    "begin is 0": Case("sentencepiece", options={"bos_id": 0, "unk_id": 3, "eos_id": 1}),
    "legacy, <mask> and <eos> are pieces": Case(
        "sentencepiece", is_legacy=True, options={**_MISSING, "user_defined_symbols": ["<mask>", "<eos>"]}
    ),
}


def write_files(case: Case, directory: Path) -> Path:
    """Write a tokenizer's files under FasterTransformer's names."""
    if not case.archive:
        (directory / "tokenizer.model").write_bytes(_trained(case.options))
        return directory
    suffixes = {"_vocab.json": "vocab.json", "_merges.txt": "merges.txt", ".model": "tokenizer.model"}
    with tarfile.open(NEMO / case.archive) as tar:
        for member in tar:
            for suffix, name in suffixes.items():
                if member.name.endswith(suffix):
                    (directory / name).write_bytes(tar.extractfile(member).read())  # type: ignore[union-attr]
    if not case.has_end_of_text:
        vocabulary = json.loads((directory / "vocab.json").read_text())
        kept = sorted((number, token) for token, number in vocabulary.items() if token != "<|endoftext|>")
        (directory / "vocab.json").write_text(json.dumps({token: i for i, (_, token) in enumerate(kept)}))
    return directory


def _trained(options: dict[str, Any]) -> bytes:
    stream = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["abcdefgh hgfedcba"] * 10),
        model_writer=stream,
        vocab_size=16,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return stream.getvalue()


def our_answer(case: Case, directory: Path) -> dict[str, Any]:
    """What is said without NeMo, in the form of its answer."""
    archive = open_archive(directory)
    members = {name: name for name in ("vocab.json", "merges.txt", "tokenizer.model") if name in archive}
    files = TokenizerFiles(members, case.library, case.is_legacy)
    ids = special_ids(archive, files)
    encoder = load_tokenizer(directory)
    return {
        "start_id": ids.start_id,
        "end_id": ids.end_id,
        "vocabulary_size": vocabulary_size(archive, files),
        "ids": [encoder.encode(text) for text in TEXTS],
    }
