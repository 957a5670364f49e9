"""The reference: a checkpoint's scores of passages, streamed out of it and kept by its digest.

What the engine can read is read in place. What it cannot (NeMo's and Megatron's checkpoints, GPT-2, quantized weights
that it does not compute with) is converted first, in fp32, into a directory that is removed again; a conversion goes on
where it was killed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from backends.fastertransformer.engine.errors import EngineError
from backends.fastertransformer.engine.model.families import read_config
from evaluation.divergence.corpus import digest_of
from evaluation.divergence.stage import Ids, LayeredModel, Numbers
from evaluation.divergence.streamed import Scores, stream
from export_scripts.arguments import FASTERTRANSFORMER, HUGGINGFACE, ConvertArguments
from export_scripts.checkpoints.digests import crc32_of
from export_scripts.checkpoints.formats import find_archive, open_source
from export_scripts.checkpoints.source import Source
from export_scripts.checkpoints.user_files import NOTHING_GIVEN, GivenFiles
from export_scripts.conversion.job import workers_of
from export_scripts.convert import convert
from ft_format.location import is_hub_directory
from handover.digests import file_digest
from handover.durable import temporary_beside, write_atomically
from handover.errors import ConfigError
from handover.manifest import FILE_NAME as MANIFEST
from models.described import find_model_tensors

_PROCESSES = 16
_SCORES, _ABOUT, _WORK, _WEIGHTS = "scores.npz", "reference.json", "work", "weights"
_VERSION = 1  # of what is kept


@dataclass(frozen=True)
class CheckpointReference:
    """A checkpoint whose scores are computed, or were.

    Attributes:
        given: what belongs to it and lies elsewhere.
        digest: of its files, and of what is given.
        directory: where everything of this checkpoint is kept.
    """

    source: Source
    given: GivenFiles
    digest: str
    directory: Path

    @property
    def model_type(self) -> str:
        """config.pbtxt's, for shards."""
        return self.source.family.model_types[0]

    def scores(self, passages: Sequence[Ids], top: int, numbers: Numbers) -> Scores:
        """Read the scores of passages, or compute them and keep them.

        Args:
            passages: token ids.
            top: most probable tokens of each place.
            numbers: formats to compute in.

        Raises:
            ConfigError: a passage is longer than the network goes, or the engine does not compute it here.
        """
        about = {"version": _VERSION, "checkpoint": self.digest, "passages": digest_of(passages)}
        about |= {"numbers": str(numbers), "top": str(top)}
        name = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]
        place = self.directory / name
        if not (place / _ABOUT).is_file():
            model, longest = self.open(numbers), max(map(len, passages))
            if longest > (most := model.config.max_pos_seq_len):
                raise ConfigError(
                    f"passages have up to {longest} tokens, and the reference is computed up to {most}",
                    f"give evaluation.divergence.longest_passage={most}",
                )
            place.mkdir(parents=True, exist_ok=True)
            try:
                found = stream(model, passages, top, place / _WORK, f"reference in {numbers}")
            except EngineError as error:
                raise ConfigError(f"the reference cannot be computed here: {error}") from error
            _write(place / _SCORES, found)
            write_atomically(place / _ABOUT, json.dumps(about, indent=1) + "\n")
            shutil.rmtree(place / _WORK, ignore_errors=True)
        with np.load(place / _SCORES) as stored:
            return Scores(stored["log_probs"], stored["top_ids"], stored["top"])

    def open(self, numbers: Numbers) -> LayeredModel:
        """Open the checkpoint as what the engine reads, converted if it must be.

        Raises:
            ConfigError: the engine does not compute this network.
        """
        path, is_whole = self.source.archive.path, self.given.adapter is None
        if numbers.quantization:
            path, is_whole = self._quantized(numbers.quantization), True
        if not (is_whole and _is_read(path)):
            path = self._converted(self._wish(path, self.directory / f"{_WEIGHTS}{numbers.quantization}"))
        try:
            return LayeredModel(path, self.model_type, numbers)
        except EngineError as error:
            raise ConfigError(f"the drop-in engine, which computes the reference, does not read it: {error}") from error

    def close(self) -> None:
        """Remove what was converted."""
        for path in self.directory.glob(f"{_WEIGHTS}*"):
            shutil.rmtree(path, ignore_errors=True)

    def _quantized(self, quantization: str) -> Path:
        """Quantize the checkpoint by itself, whatever is served."""
        wish = self._wish(self.source.archive.path, self.directory / f"{_WEIGHTS}_of_{quantization}")
        wish = replace(wish, format=HUGGINGFACE, quantization=quantization, weight_data_type="bf16")
        return self._converted(replace(wish, allow_nonfinite=False))

    def _converted(self, wish: ConvertArguments) -> Path:
        if not (wish.output / MANIFEST).is_file():
            convert(wish)
        return wish.output

    def _wish(self, checkpoint: Path, output: Path) -> ConvertArguments:
        has_shards = not (self.source.beyond or self.source.family.beyond(self.source.dims))
        given = self.given if checkpoint == self.source.archive.path else NOTHING_GIVEN
        return ConvertArguments(
            checkpoint,
            output,
            weight_data_type="fp32",
            processes=workers_of(_PROCESSES),
            allow_nonfinite=True,
            adapter=given.adapter,
            tokenizer=given.tokenizer,
            format=FASTERTRANSFORMER if has_shards else HUGGINGFACE,
        )


def open_reference(checkpoint: Path, references: Path, given: GivenFiles) -> CheckpointReference:
    """Open a checkpoint, whose bytes are all read for its digest.

    Raises:
        CheckpointError: it cannot be read.
        ConfigError: it is an encoder-decoder.
    """
    archive = find_archive(checkpoint, given)
    source = open_source(archive, for_shards=False)
    if source.family.is_encoder_decoder:
        raise ConfigError(
            f"{checkpoint} is an encoder-decoder, and divergence scores texts from their first token on",
            "compare it with evaluation=parity",
        )
    digest = crc32_of(archive, workers_of(_PROCESSES))
    if given.adapter is not None:
        digest += "+" + _digest_of_files(given.adapter)
    directory = references / hashlib.sha256(digest.encode()).hexdigest()[:16]
    return CheckpointReference(source, replace(given), digest, directory)


def _digest_of_files(path: Path) -> str:
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    return hashlib.sha256("".join(map(file_digest, files)).encode()).hexdigest()


def _is_read(path: Path) -> bool:
    """Return whether the engine reads a checkpoint as it is."""
    if not (path.is_dir() and is_hub_directory(path)):
        return False
    try:
        config = read_config(path, "Llama")
        assert config.decoder, "it was read from config.json"
        find_model_tensors(path, config.decoder, EngineError)
    except EngineError:
        return False
    return True


def _write(path: Path, scores: Scores) -> None:
    temporary = temporary_beside(path)
    with temporary.open("wb") as stream_:
        np.savez(stream_, log_probs=scores.log_probs, top_ids=scores.top_ids, top=scores.top)
    os.replace(temporary, path)
