"""The tokenizer's files inside a NeMo checkpoint, and the ids that FasterTransformer's converter derives from them.

Rules: FasterTransformer, examples/pytorch/gpt/utils/nemo_ckpt_convert.py and examples/pytorch/tokenizer.py, on
NeMo's tokenizers with ``legacy=True``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from export_scripts.checkpoints.archive import Archive
from handover.errors import CheckpointError

_END_OF_TEXT = "<|endoftext|>"
# Configuration key: (FasterTransformer's file name, how the file is called where the key holds a foreign path).
_FILES = {
    "vocab_file": ("vocab.json", "*vocab*"),
    "merge_file": ("merges.txt", "*merge*.txt"),
    "model": ("tokenizer.model", "*.model"),
}


@dataclass(frozen=True)
class TokenizerFiles:
    """A tokenizer's files within an archive.

    Attributes:
        members: name in the archive by FasterTransformer's file name.
        library: ``bpe`` (vocab.json and merges.txt), ``sentencepiece`` (tokenizer.model) or ``wordpiece`` (vocab.txt).
    """

    members: Mapping[str, str]
    library: str


@dataclass(frozen=True)
class SpecialIds:
    """Ids that ``config.ini`` names.

    Attributes:
        start_id: of the token that begins a text.
        end_id: of the token that ends one.
        pad_id: of the token that fills a batch up; None: not known.
    """

    start_id: int
    end_id: int
    pad_id: int | None = None


def find_tokenizer(archive: Archive, config: Mapping[str, Any]) -> TokenizerFiles:
    """Find the tokenizer's files; the archive's names carry a prefix that changes with each save.

    Raises:
        CheckpointError: the library is neither GPT-2 BPE nor SentencePiece nor BERT's WordPiece, or a file is missing.
    """
    settings = config.get("tokenizer") or {}
    library, kind = settings.get("library"), settings.get("type")
    if library == "sentencepiece":
        return TokenizerFiles(_members(archive, settings, ("model",)), "sentencepiece")
    if (library == "megatron" and kind == "GPT2BPETokenizer") or (library == "huggingface" and "gpt2" in str(kind)):
        return TokenizerFiles(_members(archive, settings, ("vocab_file", "merge_file")), "bpe")
    if library == "megatron" and str(kind).startswith("BertWordPiece"):
        return TokenizerFiles({"vocab.txt": _member(archive, "vocab_file", settings.get("vocab_file"))}, "wordpiece")
    raise CheckpointError(
        f"{archive.path}: tokenizer.library: {library}, tokenizer.type: {kind} is not supported",
        "GPT-2 BPE (library megatron, type GPT2BPETokenizer), BertWordPiece and sentencepiece are",
    )


def _members(archive: Archive, settings: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, str]:
    return {_FILES[key][0]: _member(archive, key, settings.get(key)) for key in keys}


def _member(archive: Archive, key: str, value: Any) -> str:
    """Find the file a key names: ``nemo:<name>``, ``/artifacts/<name>``, or a path of the training machine."""
    name = str(value or "").removeprefix("nemo:").rpartition("/")[2]
    at_root = [member for member in archive.sizes if "/" not in member]
    if name in at_root:
        return name
    found = [member for member in at_root if name and member.endswith(name)]
    if not found and not str(value).startswith("nemo:"):
        found = [member for member in at_root if fnmatchcase(member, _FILES[key][1])]
    if len(found) != 1:
        what = f"several: {', '.join(found)}" if found else "it is not there"
        raise CheckpointError(
            f"{archive.path}: tokenizer.{key}: {value} names no one file of the checkpoint: {what}",
            "the tokenizer's files must be inside the checkpoint",
        )
    return found[0]


def special_ids(archive: Archive, tokenizer: TokenizerFiles) -> SpecialIds:
    """Derive start_id and end_id as FasterTransformer's converter does."""
    if tokenizer.library == "bpe":
        end_id = _bpe_end_id(archive, tokenizer.members["vocab.json"])
        return SpecialIds(end_id, end_id)
    if tokenizer.library == "wordpiece":
        return _wordpiece_ids(archive, tokenizer.members["vocab.txt"])
    return _sentencepiece_ids(archive.read_bytes(tokenizer.members["tokenizer.model"]))


def vocabulary_size(archive: Archive, tokenizer: TokenizerFiles) -> int:
    """Count the tokenizer's own tokens, without the padding that training adds: the id of the next token added."""
    if tokenizer.library == "sentencepiece":
        return int(_sentencepiece(archive.read_bytes(tokenizer.members["tokenizer.model"])).get_piece_size())
    if tokenizer.library == "wordpiece":
        return len(archive.read_bytes(tokenizer.members["vocab.txt"]).splitlines())
    member = tokenizer.members["vocab.json"]
    end_id = _bpe_end_id(archive, member)
    return max(end_id + 1, len(json.loads(archive.read_bytes(member))))


def _bpe_end_id(archive: Archive, member: str) -> int:
    """GPT-2's one special token; a vocabulary without it gets it as its next entry."""
    try:
        vocabulary = json.loads(archive.read_bytes(member))
        return int(vocabulary.get(_END_OF_TEXT, len(vocabulary)))
    except (ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{archive.path}: {member} is not a vocabulary: {error}") from error


def _wordpiece_ids(archive: Archive, member: str) -> SpecialIds:
    """BERT's tokens around a text, as NeMo's AutoTokenizer takes them for begin and end; one token a line."""
    lines = archive.read_bytes(member).decode("utf-8", "replace").splitlines()
    ids = {token: lines.index(token) for token in ("[CLS]", "[SEP]", "[PAD]") if token in lines}
    if len(ids) < 3:
        raise CheckpointError(f"{archive.path}: {member} lacks one of [CLS], [SEP], [PAD]", "is it a BERT vocabulary?")
    return SpecialIds(*ids.values())


def _sentencepiece(model: bytes) -> Any:
    import sentencepiece  # only where such a tokenizer is needed

    try:
        return sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise CheckpointError(f"the checkpoint's tokenizer.model is not a SentencePiece model: {error}") from error


def _sentencepiece_ids(model: bytes) -> SpecialIds:
    """Ids of a SentencePiece model; a missing begin or end token is added after the pieces, as in legacy mode."""
    pieces = _sentencepiece(model)
    added: dict[str, int] = {}

    def id_of(token: str) -> int:
        known = pieces.piece_to_id(token)
        if known != pieces.unk_id():
            return int(known)
        return added.setdefault(token, pieces.get_piece_size() + len(added))

    def id_or_new(current: int, token: str) -> int:
        return current if current > 0 else id_of(token)

    # The order decides the ids: these come first, whether or not anybody needs them.
    for token in ("<cls>", "<sep>", "<mask>"):
        id_of(token)
    pad_id = id_or_new(pieces.pad_id(), "<pad>")
    start_id = id_or_new(pieces.bos_id(), "<bos>")
    return SpecialIds(start_id, id_or_new(pieces.eos_id(), "<eos>"), pad_id)
