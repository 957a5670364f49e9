"""References, which compute the source's log probabilities: Hugging Face's code, or the drop-in engine in fp32.

Both read the training checkpoint itself, never the served shards. Hugging Face's forward pass is an independent
computation: of its own checkpoints as its own reader reads them, of a GPT of NeMo's as ``nemo_gpt2`` does. The engine's
is not: it reads the checkpoint with this project's reader, so it shows later errors (a swapped or damaged shard, a
wrong layout on disk, a wrong quantization, ranks that do not fit), and not an error of the reader. The same is true of
Hugging Face's on a directory that the converter writes from a model without shards. The report names the reference.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from backends.fastertransformer.engine.loading import load_steps
from backends.fastertransformer.engine.settings import Settings
from backends.fastertransformer.engine.steps.steps import Steps
from evaluation.parity.arguments import ENGINE, HUGGING_FACE
from evaluation.parity.formats import Formats
from evaluation.parity.nemo_gpt2 import UnfitError, as_gpt2
from evaluation.parity.twin import Twin
from export_scripts.arguments import HUGGINGFACE, ConvertArguments
from export_scripts.checkpoints.formats import find_archive, open_source
from export_scripts.checkpoints.huggingface.quantized import QuantizedTensor
from export_scripts.checkpoints.lora.update import MergedTensor
from export_scripts.checkpoints.source import Source
from export_scripts.checkpoints.user_files import NOTHING_GIVEN, GivenFiles
from export_scripts.conversion.job import workers_of
from export_scripts.convert import convert
from export_scripts.tensors.small_floats import E4M3
from handover.errors import ConfigError

LogProbs = npt.NDArray[np.float32]
_PROCESSES = 16


class Reference(Protocol):
    """The source model, which scores tokens.

    Attributes:
        name: name for the report.
        vocab_size: number of tokens in the vocabulary.
        source: the training checkpoint; None where the model was made in memory.
    """

    name: str
    vocab_size: int
    source: Source | None

    def log_probs(self, prompt: Sequence[int], tokens: Sequence[int]) -> LogProbs:
        """Score a prompt's tokens from the second on and the generated ones; for an encoder-decoder the latter alone.

        Returns:
            [n, V]: log probabilities at each of these positions, given the preceding tokens.
        """


def open_reference(
    checkpoint: Path, wanted: str, scratch: Path, given: GivenFiles = NOTHING_GIVEN, served: Path | None = None
) -> tuple[Reference, tuple[str, ...]]:
    """Open the source with what can compute it, and say why it is not something better.

    Args:
        checkpoint: the training checkpoint.
        wanted: auto, huggingface or engine.
        scratch: directory for a reading of the weights in fp32; it is emptied.
        given: what belongs to the checkpoint and lies elsewhere.
        served: the adapter beside it that answers.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        ConfigError: Hugging Face's code is requested and cannot compute the model.
    """
    source, notes = open_source(find_archive(checkpoint, given), for_shards=False), tuple[str, ...]()
    if served is not None:
        return _with_adapter(source, scratch, given, served), _about_nemo(source)
    if wanted != ENGINE:
        if find_spec("transformers") and _is_fp8(source):  # it needs packages more, or a GPU, or does not read it
            return _read_again(source, scratch, given), ()
        try:
            return _hugging_face(source), _about_nemo(source)
        except UnfitError as error:
            if find_spec("transformers") and (source.beyond or source.family.beyond(source.dims)):
                return _read_again(source, scratch, given), _about_nemo(source)
            if wanted == HUGGING_FACE:
                raise ConfigError(f"parity: reference=huggingface: {error}", "take reference=auto") from error
            notes = (f"{source.source_map.name}: Hugging Face cannot compute it: {error}", *_about_nemo(source))
    return EngineReference(source, scratch, given), notes


def _is_fp8(source: Source) -> bool:
    tensors = source.own.tensors.values() if source.own else ()
    return any(isinstance(each, QuantizedTensor) and each.kind == E4M3 for each in tensors)


def _hugging_face(source: Source) -> HuggingFaceReference:
    """Open a checkpoint with Hugging Face's code.

    Raises:
        UnfitError: it cannot be, for the reason that is said.
    """
    if any(isinstance(tensor, MergedTensor) for tensor in source.tensors.values()):
        raise UnfitError("a LoRA adapter is merged into it")
    if find_spec("transformers") is None:
        raise UnfitError("transformers is not installed (pip install transformers)")
    if source.source_map.name.startswith("Hugging Face"):
        return _loaded(source.archive.path, source)
    model = as_gpt2(source)
    return HuggingFaceReference(f"{_code()}: GPT-2 with the checkpoint's tensors", model, source=source)


def _read_again(source: Source, scratch: Path, given: GivenFiles) -> HuggingFaceReference:
    """Open a model that has no shards or is FP8 with Hugging Face's code, on the directory that it becomes in fp32."""
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        convert(replace(_wish(source, scratch, given), format=HUGGINGFACE))
        return _loaded(scratch, source, f", on weights read again from the source ({source.source_map.name})")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)  # the weights are in memory


def _with_adapter(source: Source, scratch: Path, given: GivenFiles, adapter: Path) -> HuggingFaceReference:
    """Open a model with Hugging Face's code, on the directory that it becomes in fp32 with an adapter merged into it.

    Raises:
        ConfigError: transformers is not installed.
    """
    if find_spec("transformers") is None:
        raise ConfigError("parity of an adapter is computed by transformers", "pip install transformers")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        convert(replace(_wish(source, scratch / "model", given), format=HUGGINGFACE))
        wish = ConvertArguments(scratch / "model", scratch / "merged", adapter=adapter, weight_data_type="fp32")
        convert(replace(wish, format=HUGGINGFACE))
        return _loaded(scratch / "merged", source, f", on weights read again from the source with {adapter} merged")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)  # the weights are in memory


def _loaded(directory: Path, source: Source, remark: str = "") -> HuggingFaceReference:
    """Load a directory of Hugging Face's into the class that its configuration names."""
    import transformers

    name, is_t5 = f"{_code()}{remark}", source.family.is_encoder_decoder
    kind = transformers.AutoModelForSeq2SeqLM if is_t5 else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(directory, local_files_only=True, dtype=torch.float32).eval()
    return HuggingFaceReference(name, model, is_t5, source)


def _code() -> str:
    """Return the name of what computes, and keep it from drawing."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return f"Hugging Face transformers {transformers.__version__}, fp32"


def _wish(source: Source, scratch: Path, given: GivenFiles) -> ConvertArguments:
    wish = ConvertArguments(source.archive.path, scratch, 1, "fp32", workers_of(_PROCESSES), allow_nonfinite=True)
    return replace(wish, adapter=given.adapter, tokenizer=given.tokenizer)


def _about_nemo(source: Source) -> tuple[str, ...]:
    """Return why NeMo itself does not compute a checkpoint of NeMo's."""
    if "NeMo" not in source.source_map.name:
        return ()
    if find_spec("nemo") is None:
        return ("NeMo is not installed",)
    try:
        has_models = find_spec("nemo.collections.nlp") is not None
    except ModuleNotFoundError:
        has_models = False
    return (f"the installed NeMo {'takes apex and a trainer to build it' if has_models else 'has no GPT and no T5'}",)


class HuggingFaceReference:
    """Hugging Face's model of the checkpoint, in fp32 on the CPU."""

    def __init__(self, name: str, model: Any, is_t5: bool = False, source: Source | None = None) -> None:
        self.name, self.model, self._is_t5, self.source = name, model, is_t5, source
        self.vocab_size = int(model.config.vocab_size)

    def twin(self, formats: Formats, is_ours: bool) -> Twin:
        """Convert the model to a served model's number formats, in place: from then on it scores as the twin does."""
        return Twin(self.model, self._is_t5, formats, is_ours)

    @torch.inference_mode()
    def log_probs(self, prompt: Sequence[int], tokens: Sequence[int]) -> LogProbs:
        """Score tokens; see ``Reference``."""
        if self._is_t5:
            start = self.model.config.decoder_start_token_id
            given = {"input_ids": torch.tensor([prompt]), "decoder_input_ids": torch.tensor([[start, *tokens[:-1]]])}
            logits = self.model(**given).logits[0]
        else:
            logits = self.model(torch.tensor([[*prompt, *tokens]])).logits[0, :-1]
        return _normalised(logits)


class EngineReference:
    """The drop-in engine on one rank of weights that are read again, in fp32."""

    def __init__(self, source: Source, scratch: Path, given: GivenFiles = NOTHING_GIVEN) -> None:
        self.source: Source | None = source
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            convert(_wish(source, scratch, given))
            settings = Settings(scratch, 1, 1, "fp32", model_type=source.family.model_types[0])
            self._steps: Steps = load_steps(settings, torch.device("cpu"))[0]
        finally:
            shutil.rmtree(scratch, ignore_errors=True)  # the weights are in memory
        self.vocab_size = self._steps.config.vocab_size
        self.name = f"the drop-in engine in fp32, on weights read again from the source ({source.source_map.name})"

    @torch.inference_mode()
    def log_probs(self, prompt: Sequence[int], tokens: Sequence[int]) -> LogProbs:
        """Score tokens; see ``Reference``."""
        config, longest_source = self._steps.config, 0
        ids = [*prompt, *tokens[:-1]]
        if config.encoder is not None:
            ids, longest_source = [config.start_id, *tokens[:-1]], len(prompt)
        count, no_rows = np.array([len(ids)]), np.array([], np.int64)
        row = self._steps.cache.allocator.take(len(ids), source=longest_source)
        self._steps.slots.allocate(0, [row], count)
        if longest_source:
            self._steps.encode(np.array(prompt), np.array([longest_source]), np.array([-1]), 0)
        hidden = self._steps.extend(np.array(ids), np.zeros_like(count), count, 0)
        self._steps.slots.free(1, 0, no_rows, no_rows)
        self._steps.cache.allocator.release([row])
        return _normalised(self._steps.predictions.logits(hidden))


def _normalised(logits: torch.Tensor) -> LogProbs:
    log_probs: LogProbs = logits.float().log_softmax(dim=-1).cpu().numpy()
    return log_probs
