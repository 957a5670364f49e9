"""A tokenizer of transformers put together from its files: the whole of it as a ``tokenizer.json``.

A directory of transformers may spread a tokenizer over half a dozen files, and leave out what its class has by default.
Here it is put together as ``from_pretrained`` does it, so that everything behind the conversion reads one file.

Rules: transformers 5, ``tokenization_utils_tokenizers.py``, and ``processors/*.rs`` of tokenizers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.files.bounded import parse_json
from export_scripts.checkpoints.huggingface.files import read_json
from export_scripts.checkpoints.tokenizers import class_vocabularies, classes
from export_scripts.checkpoints.tokenizers.classes import GENERIC, OF_PAIRS, Vocabulary
from export_scripts.checkpoints.tokenizers.nemo import TokenizerFiles
from export_scripts.checkpoints.tokenizers.pieces import read_pieces
from export_scripts.checkpoints.tokenizers.settings import AROUND, Settings, Token
from export_scripts.checkpoints.tokenizers.special_tokens import around_of, has_part
from export_scripts.checkpoints.tokenizers.vocabularies import checked, tokens_in
from handover.errors import CheckpointError, shortened
from handover.text_ids import TextIds
from models.checks import quoted
from models.directory import CONFIG_FILE

_DESCRIPTION, _PIECES, _PAIRS = "tokenizer.json", "tokenizer.model", ("vocab.json", "merges.txt")


@dataclass(frozen=True)
class Assembled:
    """A whole tokenizer.

    Attributes:
        content: of a ``tokenizer.json``.
        special: the special tokens that have a name, such as ``bos_token``.
        around: what stands around a text's own tokens.
    """

    content: bytes
    special: Mapping[str, str] = field(default_factory=dict)
    around: TextIds = TextIds()


def assemble(
    archive: Archive, folder: str, files: Mapping[str, bytes], model_type: str, extra_ids: int | None = None
) -> Assembled:
    """Put a tokenizer together.

    Args:
        archive: the checkpoint.
        folder: of the files beside the vocabulary, with a slash at its end; empty: the root.
        files: the vocabulary, by FasterTransformer's file names.
        model_type: of the model; that of a ``config.json`` in the folder goes before it.
        extra_ids: see ``whole``.

    Raises:
        CheckpointError: a file is damaged, or names a token that the vocabulary lacks.
    """
    where = f"{archive.path}: {folder}{next(iter(files))}"
    try:
        assembly = _Assembly(archive, folder, files, model_type)
        if extra_ids is not None:
            assembly.settings.values.setdefault("extra_ids", extra_ids)
        return assembly.whole()
    except CheckpointError:
        raise
    except BaseException as error:  # the library raises bare Exception, and panics beside it
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(
            f"{where} is no tokenizer that transformers reads: {shortened(str(error), 300)}",
            "copy the tokenizer's files again, or give export.model.tokenizer",
        ) from error


def whole(archive: Archive, tokenizer: TokenizerFiles, model_type: str, extra_ids: int | None = None) -> TokenizerFiles:
    """Add the whole tokenizer to the files that were found of it, with what stands around a text.

    Args:
        archive: the checkpoint.
        tokenizer: that transformers reads.
        model_type: of the model.
        extra_ids: T5's sentinels that the model has rows for, where no file says it.
    """
    if tokenizer.library not in ("huggingface", "bpe", "sentencepiece"):
        return tokenizer
    files = tokenizer.contents(archive)
    # Of pieces of bytes, which no published T5 has, its class would write the names, <0x1D>; SentencePiece joins them.
    if model_type in ("t5", "mt5") and set(files) == {_PIECES} and read_pieces(files[_PIECES]).has_bytes:
        return tokenizer
    folder = next(iter(tokenizer.members.values())).rpartition("/")[0]
    made = assemble(archive, f"{folder}/" if folder else "", files, model_type, extra_ids)
    own = {} if made.content == files.get(_DESCRIPTION) else {_DESCRIPTION: made.content}
    return replace(tokenizer, made=own, special=made.special, text_ids=made.around)


class _Assembly:
    """What is put together, step by step."""

    def __init__(self, archive: Archive, folder: str, files: Mapping[str, bytes], model_type: str) -> None:
        self._archive, self._folder, self._files = archive, folder, files
        self._where = f"{archive.path}: {folder}"
        own = files.get(_DESCRIPTION)
        self._description: Mapping[str, Any] = parse_json(own, f"{self._where}{_DESCRIPTION}") if own else {}
        if own:
            tokens_in(own, f"{self._where}{_DESCRIPTION}")
        self.settings = Settings(archive, folder, self._description)
        if self.settings.added:
            ids = {token.content: number for number, token in self.settings.added.items()}
            checked(ids, f"{self._where}added tokens")
        config = read_json(archive, folder + CONFIG_FILE)
        declared = str(self.settings.values.get("tokenizer_class") or config.get("tokenizer_class") or "")
        parts = (self._description.get("decoder"), self._description.get("pre_tokenizer"))
        is_bytes = any(has_part(part, "ByteLevel") for part in parts)
        name = classes.class_of(str(config.get("model_type") or model_type), declared, is_bytes)
        self._pieces = read_pieces(files[_PIECES]) if not own and _PIECES in files else None
        if not own and (name in OF_PAIRS) == bool(self._pieces):
            name = "LlamaTokenizer" if self._pieces else "GPT2Tokenizer"
        self._class = name

    def whole(self) -> Assembled:
        """Return the whole tokenizer."""
        if self._pieces and self._class == GENERIC:
            self.settings.values = {**self._pieces.special, **self.settings.values}
        special = self.settings.special(self._class)
        pipeline = self._pipeline(special)
        around = self._around(pipeline, special)
        own = class_vocabularies.own_tokens(self._pieces) if self._pieces else ()
        complete(pipeline, self.settings, special, self.settings.extra(self._class, own))
        processor, ids = self._post_processor(pipeline, around)
        pipeline.post_processor = processor
        given = self._files.get(_DESCRIPTION)
        content = given if given and is_like(pipeline, given) else written(pipeline)
        return Assembled(content, {key: token.content for key, token in special.items()}, ids)

    def _pipeline(self, special: Mapping[str, Token]) -> Any:
        """Make the pipeline without added tokens; a class without a way of its own takes the file's, with them."""
        from tokenizers import Tokenizer

        build = classes.BUILDERS.get(self._class)
        if build is not None:
            settings = {**self.settings.values, **{key: token.content for key, token in special.items()}}
            return build(self._vocabulary(settings), settings)
        if self._pieces is None:
            return Tokenizer.from_str(self._files[_DESCRIPTION].decode())
        vocabulary = class_vocabularies.of_pieces(self._pieces, is_bpe=not self._pieces.is_unigram)
        unknown = (self._pieces.unknown_id, self._pieces.special.get("unk_token", "<unk>"))
        return classes.of_pieces(
            class_vocabularies.with_renamed(vocabulary, self.settings.added), unknown, self._pieces.has_bytes
        )

    def _vocabulary(self, settings: Mapping[str, Any]) -> Vocabulary:
        """Take the vocabulary of whatever file there is, for a class with a way of its own."""
        is_scored = self._class in classes.UNIGRAM
        if self._description:
            return class_vocabularies.of_description(self._description, is_scored)
        if self._pieces is None:
            tokens, merges = (self._files[name] for name in _PAIRS)
            return class_vocabularies.of_pairs(tokens, merges, self._where)
        return classes.with_sentinels(self._class, class_vocabularies.of_pieces(self._pieces, not is_scored), settings)

    def _around(self, pipeline: Any, special: Mapping[str, Token]) -> dict[str, list[str]]:
        """Name what stands before and behind a text by the settings.

        Raises:
            CheckpointError: no file has such a token.
        """
        added = {token.content for token in self.settings.added.values()}
        names: dict[str, list[str]] = {}
        for key, name in AROUND.items():
            token = special.get(name)
            names[key] = [token.content] if token and self.settings.adds(self._class, key) else []
            if any(content not in added and pipeline.token_to_id(content) is None for content in names[key]):
                raise CheckpointError(
                    f"{self._where}tokenizer_config.json puts {name} {quoted(names[key][0])} into every text, and no "
                    "file has its id",
                    "put tokenizer.json beside the weights, or mend tokenizer_config.json",
                )
        return names

    def _post_processor(self, pipeline: Any, names: Mapping[str, list[str]]) -> tuple[Any, TextIds]:
        """Make what puts tokens around a text: a class's own way, the file's, or that of the settings."""
        from tokenizers import Tokenizer

        given = self._description.get("post_processor")
        around = classes.AROUND.get(self._class)
        if around is None and given and self._class not in classes.WITHOUT_THE_FILES:
            ids = around_of(given, f"{self._where}{_DESCRIPTION}")
            return Tokenizer.from_str(self._files[_DESCRIPTION].decode()).post_processor, TextIds(*ids)
        before, after = around or names.values()
        return template_of(pipeline, list(before), list(after))


def complete(pipeline: Any, settings: Settings, special: Mapping[str, Token], extra: Iterable[Token]) -> None:
    """Add the tokens that lie beside the vocabulary to a pipeline, in transformers' order: it decides their ids.

    Raises:
        ValueError: a token does not get the id that the files give it.
    """
    from tokenizers import AddedToken

    wanted = [token for _, token in sorted(settings.added.items())]
    known = {each.content for each in pipeline.get_added_tokens_decoder().values()}
    for token in (*special.values(), *extra):
        if token.content not in known and token.content not in {each.content for each in wanted}:
            wanted.append(token if token.flags else token.with_flags(special=True))
    names = {token.content for token in special.values()}
    tokens = [each.with_flags(special=True) if each.content in names else each for each in wanted]
    pipeline.add_tokens([AddedToken(each.content, **dict(each.flags)) for each in tokens])
    for number, token in settings.added.items():
        if pipeline.token_to_id(token.content) != number:
            raise ValueError(
                f"the token {quoted(token.content)} has the id {number} in the files and "
                f"{pipeline.token_to_id(token.content)} by its place behind the vocabulary"
            )


def template_of(pipeline: Any, before: list[str], after: list[str]) -> tuple[Any, TextIds]:
    """Make what puts tokens around a text, and say their ids."""
    from tokenizers import processors

    ids = {content: pipeline.token_to_id(content) for content in (*before, *after)}
    single = [*before, "$A", *after]
    made = processors.TemplateProcessing(single=single, pair=[*single, "$B:1"], special_tokens=list(ids.items()))
    return made, TextIds(*(tuple(ids[content] for content in side) for side in (before, after)))


def written(pipeline: Any) -> bytes:
    """Write a ``tokenizer.json`` that older versions of the library read too: they have a pair's halves in one text."""
    description = json.loads(pipeline.to_str())
    pairs = description["model"].get("merges") or []
    if not any(" " in half for pair in pairs for half in pair):
        description["model"] |= {"merges": [" ".join(pair) for pair in pairs]} if pairs else {}
    return json.dumps(description, ensure_ascii=False).encode()


def is_like(pipeline: Any, content: bytes) -> bool:
    """Whether a ``tokenizer.json`` says what a pipeline does, but for what is put around a text."""
    from tokenizers import Tokenizer

    other = Tokenizer.from_str(content.decode())
    for each in (pipeline, other):
        each.no_truncation()
        each.no_padding()
    found = [json.loads(each.to_str()) for each in (pipeline, other)]
    return bool(found[0] | {"post_processor": None} == found[1] | {"post_processor": None})
