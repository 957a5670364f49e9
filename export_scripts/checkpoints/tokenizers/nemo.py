"""The tokenizer's files inside a NeMo checkpoint, and the ids that FasterTransformer's converter derives from them.

Rules: FasterTransformer, examples/pytorch/gpt/utils/nemo_ckpt_convert.py and examples/pytorch/tokenizer.py, on
NeMo's tokenizers with ``legacy=True``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.files.bounded import parse_json
from export_scripts.checkpoints.tokenizers import tiktoken, wordpiece
from export_scripts.checkpoints.tokenizers.vocabularies import (
    described_tokens,
    end_of_text,
    read_vocabulary,
    tokens_in,
)
from handover.errors import CheckpointError
from handover.text_ids import TextIds
from models.checks import quoted, shown
from models.directory import SpecialIds

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
        library: ``bpe`` (vocab.json and merges.txt), ``sentencepiece`` (tokenizer.model), ``wordpiece`` (vocab.txt) or
            ``huggingface`` or ``tiktoken`` (tokenizer.json).
        is_legacy: NeMo's way with SentencePiece: special tokens that the model lacks are added after its pieces.
        is_nemos: a configuration of NeMo's describes it.
        text_ids: what stands around a text's own tokens.
        rewrites: by FasterTransformer's file name, makes its content of the archive's; the others are copied.
        made: contents of files that several of the archive's say together; they go before those of ``members``.
        special: special tokens that a chat template may name, where more than the files beside it are known of them.
    """

    members: Mapping[str, str]
    library: str
    is_legacy: bool = True
    is_nemos: bool = False
    text_ids: TextIds = TextIds()
    rewrites: Mapping[str, Callable[[bytes], bytes]] = field(default_factory=dict)
    made: Mapping[str, bytes] = field(default_factory=dict)
    special: Mapping[str, str] = field(default_factory=dict)

    def contents(self, archive: Archive) -> dict[str, bytes]:
        """Return the files as they are written, by FasterTransformer's name."""
        raw = {name: archive.read_bytes(member) for name, member in self.members.items()}
        written = {
            name: self.rewrites[name](content) if name in self.rewrites else content for name, content in raw.items()
        }
        return {**written, **self.made}


def find_tokenizer(archive: Archive, config: Mapping[str, Any]) -> TokenizerFiles:
    """Find the tokenizer's files; the archive's names carry a prefix that changes with each save.

    Raises:
        CheckpointError: the library is none that is read, or a file is missing.
    """
    settings = config.get("tokenizer") or {}
    if not isinstance(settings, Mapping):
        raise CheckpointError(f"{archive.path}: tokenizer is {quoted(settings)}, not a section")
    library, kind = settings.get("library"), settings.get("type")
    if library == "sentencepiece":
        is_legacy = settings.get("sentencepiece_legacy") is not False
        return TokenizerFiles(_members(archive, settings, ("model",)), "sentencepiece", is_legacy, is_nemos=True)
    if (library == "megatron" and kind == "GPT2BPETokenizer") or (library == "huggingface" and "gpt2" in str(kind)):
        return TokenizerFiles(_members(archive, settings, ("vocab_file", "merge_file")), "bpe", is_nemos=True)
    if library == "megatron" and str(kind).startswith("BertWordPiece"):
        member = _member(archive, "vocab_file", settings.get("vocab_file"))
        describe = partial(wordpiece.describe, ignores_case=wordpiece.is_lower_case(str(kind)))
        members = {wordpiece.VOCABULARY_FILE: member, "tokenizer.json": member}
        return TokenizerFiles(members, wordpiece.LIBRARY, rewrites={"tokenizer.json": describe})
    if library == tiktoken.LIBRARY:
        key = "model" if settings.get("model") else "vocab_file"
        return tiktoken_files(_member(archive, key, settings.get(key)))
    files = [member for member in archive.sizes if "/" not in member and member.endswith("tokenizer.json")]
    if library == "huggingface" and len(files) == 1:
        return TokenizerFiles({"tokenizer.json": files[0]}, "huggingface")
    if library == "huggingface":
        raise only_named(archive, str(kind))
    raise CheckpointError(
        f"{archive.path}: tokenizer.library: {library}, tokenizer.type: {kind} is not supported",
        "GPT-2 BPE (library megatron, type GPT2BPETokenizer), BertWordPiece, sentencepiece, tiktoken and huggingface "
        "are; export.model.tokenizer=PATH takes another in its place",
    )


def only_named(archive: Archive, name: str) -> CheckpointError:
    """Return the error of a checkpoint that has a tokenizer's name and not its files."""
    return CheckpointError(
        f"{archive.path} names the tokenizer {shown(name)} and does not hold its files",
        "fetch them and give export.model.tokenizer=PATH: a directory with tokenizer.json and tokenizer_config.json, "
        "with tokenizer.model, or with vocab.json and merges.txt",
    )


def tiktoken_files(member: str) -> TokenizerFiles:
    """Make a ``tokenizer.json`` of a tiktoken vocabulary."""
    rewrites = {"tokenizer.json": tiktoken.Vocabulary().describe}
    return TokenizerFiles({"tokenizer.json": member}, tiktoken.LIBRARY, is_nemos=True, rewrites=rewrites)


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


def check_files(archive: Archive, tokenizer: TokenizerFiles) -> None:
    """Make sure that a tokenizer's files are what their names say, before they are copied.

    Raises:
        CheckpointError: one is damaged, or something else.
    """
    for name, member in tokenizer.members.items():
        if name in tokenizer.rewrites or not member:
            continue  # read by what rewrites it, or made up
        if name == "vocab.json":
            read_vocabulary(archive, member)
        elif name == "tokenizer.json":
            described_tokens(archive, member)
        elif name == "tokenizer.model":
            _sentencepiece(archive.read_bytes(member))
        else:
            _decode(archive.read_bytes(member), f"{archive.path}: {member}")


def _decode(content: bytes, where: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where} is not a text: {error}", "copy the checkpoint again") from error


def special_ids(archive: Archive, tokenizer: TokenizerFiles) -> SpecialIds:
    """Derive start_id and end_id as FasterTransformer's converter does."""
    if tokenizer.library == "bpe":
        end_id = end_of_text(read_vocabulary(archive, tokenizer.members["vocab.json"]))[1]
        return SpecialIds(end_id, end_id)
    if tokenizer.library == wordpiece.LIBRARY:
        member = tokenizer.members[wordpiece.VOCABULARY_FILE]
        return SpecialIds(*wordpiece.ids_of(archive.read_bytes(member), f"{archive.path}: {member}"))
    if tokenizer.library == tiktoken.LIBRARY:
        return SpecialIds(tiktoken.BEGIN_ID, tiktoken.END_ID)
    if tokenizer.library == "huggingface":
        return _described_ids(archive, tokenizer.members["tokenizer.json"])
    return _ids_and_additions(archive.read_bytes(tokenizer.members["tokenizer.model"]), tokenizer.is_legacy)[0]


def vocabulary_size(archive: Archive, tokenizer: TokenizerFiles) -> int:
    """Count the tokenizer's own tokens, without the padding that training adds: the id of the next token added."""
    if "tokenizer.json" in tokenizer.made:
        return 1 + max(tokens_in(tokenizer.made["tokenizer.json"], "tokenizer.json").values(), default=-1)
    if tokenizer.library == "sentencepiece":
        return int(_sentencepiece(archive.read_bytes(tokenizer.members["tokenizer.model"])).get_piece_size())
    if tokenizer.library == wordpiece.LIBRARY:
        return len(wordpiece.tokens_of(archive.read_bytes(tokenizer.members[wordpiece.VOCABULARY_FILE])))
    if tokenizer.library == tiktoken.LIBRARY:
        description = json.loads(tokenizer.contents(archive)["tokenizer.json"])
        return len(description["model"]["vocab"])
    if tokenizer.library == "huggingface":
        return 1 + max(described_tokens(archive, tokenizer.members["tokenizer.json"]).values(), default=-1)
    member = tokenizer.members["vocab.json"]
    vocabulary = read_vocabulary(archive, member)
    return max(end_of_text(vocabulary)[1] + 1, len(vocabulary))


def _described_ids(archive: Archive, member: str) -> SpecialIds:
    """The begin and end tokens that the files beside ``tokenizer.json`` name, as NeMo's AutoTokenizer takes them."""
    tokens, folder = described_tokens(archive, member), member.removesuffix("tokenizer.json")
    named: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if folder + name in archive:
            content = parse_json(archive.read_bytes(folder + name), f"{archive.path}: {folder}{name}")
            named |= {key: value for key, value in content.items() if value} if isinstance(content, dict) else {}

    def id_of(*keys: str) -> int | None:
        for key in keys:
            value = named.get(key)
            token = str(value.get("content") if isinstance(value, dict) else value)
            if token in tokens:
                return tokens[token]
        return None

    end_id = id_of("eos_token", "sep_token")
    if end_id is None:
        raise CheckpointError(
            f"{archive.path}: nothing beside {member} names the end token", "put tokenizer_config.json beside it"
        )
    start_id = id_of("bos_token", "cls_token")
    return SpecialIds(end_id if start_id is None else start_id, end_id, id_of("pad_token"))


def _sentencepiece(model: bytes) -> Any:
    import sentencepiece  # only where such a tokenizer is needed

    if not model:  # the library takes it for no model given, and says nothing
        raise CheckpointError("the checkpoint's tokenizer.model is empty", "copy the checkpoint again")
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise CheckpointError(f"the checkpoint's tokenizer.model is not a SentencePiece model: {error}") from error


def sentencepiece_additions(model: bytes, is_legacy: bool) -> dict[str, int]:
    """Name the special tokens that a SentencePiece model lacks, with the ids that they get after its pieces."""
    return _ids_and_additions(model, is_legacy)[1]


def _ids_and_additions(model: bytes, is_legacy: bool) -> tuple[SpecialIds, dict[str, int]]:
    """Ids of a SentencePiece model; a missing begin or end token is added after the pieces, as in legacy mode.

    Outside of it the model's own ids are taken, 0 among them, which FasterTransformer's converter holds for missing.
    """
    pieces = _sentencepiece(model)
    least = 1 if is_legacy else 0
    added: dict[str, int] = {}

    def id_of(token: str) -> int:
        known = pieces.piece_to_id(token)
        if known != pieces.unk_id():
            return int(known)
        return added.setdefault(token, pieces.get_piece_size() + len(added))

    def id_or_new(current: int, token: str) -> int:
        return current if current >= least else id_of(token)

    # The order decides the ids: these come first, whether or not anybody needs them.
    for token in ("<cls>", "<sep>", "<mask>"):
        id_of(token)
    pad_id: int | None = id_or_new(pieces.pad_id(), "<pad>")
    start_id = id_or_new(pieces.bos_id(), "<bos>")
    end_id = id_or_new(pieces.eos_id(), "<eos>")
    if not is_legacy:
        # NeMo then adds nothing: a model without a padding token has none, and its vocabulary is its pieces alone.
        pad_id = pieces.pad_id() if pieces.pad_id() >= 0 else None
        added = {token: number for token, number in added.items() if number in (start_id, end_id)}
    return SpecialIds(start_id, end_id, pad_id), added
