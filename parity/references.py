"""What computes the source's log probabilities: Hugging Face's code, or the drop-in engine in fp32.

Both read the training checkpoint itself, never the served shards. Hugging Face's forward pass is an independent
computation of an independent reading. The engine's is not: it reads the checkpoint with this project's reader, so it
shows what happened to the weights since (a swapped or damaged shard, a wrong layout on disk, a quantisation that went
wrong, ranks that do not fit), and not an error of the reader. The report says which of the two it was.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from backends.fastertransformer.engine.cache import UNBOUNDED
from backends.fastertransformer.engine.engine import load_steps
from backends.fastertransformer.engine.settings import Settings
from backends.fastertransformer.engine.steps import Steps
from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints.formats import find_archive, open_source
from export_scripts.checkpoints.source import Source
from export_scripts.convert import convert, workers_of
from export_scripts.interfaces.serving import MODEL_TYPES
from handover.errors import ConfigError
from parity.arguments import ENGINE, HUGGING_FACE

LogProbs = npt.NDArray[np.float32]
_T5 = "t5"
_PROCESSES = 16


class Reference(Protocol):
    """The source, ready to be asked.

    Attributes:
        name: what computes, for the report.
    """

    name: str

    def log_probs(self, prompt: Sequence[int], tokens: Sequence[int]) -> LogProbs:
        """Score a prompt's tokens from the second on and those behind it; of an encoder-decoder the latter alone.

        Returns:
            [n, V]: log probabilities of the token in each of these places, given what precedes it.
        """


def open_reference(checkpoint: Path, wanted: str, scratch: Path) -> tuple[Reference, tuple[str, ...]]:
    """Open the source with what can compute it, and say why it is not something better.

    Args:
        checkpoint: the training checkpoint.
        wanted: auto, huggingface or engine.
        scratch: directory for a reading of the weights in fp32; it is emptied.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        ConfigError: Hugging Face is wanted, and cannot compute it.
    """
    source = open_source(find_archive(checkpoint))
    obstacle = _obstacle(source)
    if wanted == HUGGING_FACE and obstacle:
        raise ConfigError(f"parity: reference=huggingface: {obstacle}", "take reference=auto")
    if wanted == ENGINE or obstacle:
        return EngineReference(source, scratch), (obstacle,) if wanted != ENGINE else ()
    return HuggingFaceReference(source), ()


def _obstacle(source: Source) -> str:
    """Why no code but the engine's can compute this checkpoint; empty: Hugging Face's can."""
    name = source.source_map.name
    if name.startswith("Hugging Face"):
        return "" if find_spec("transformers") else "transformers is not installed (pip install transformers)"
    if "NeMo" in name and find_spec("nemo"):
        has_models = _has_module("nemo.collections.nlp")
        lack = "needs apex and a trainer to build it" if has_models else "has no nlp collection, so no GPT and no T5"
        return f"{name}: the installed NeMo {lack}"
    return f"{name}: nothing installed computes this format" + (" (NeMo is not installed)" if "NeMo" in name else "")


def _has_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


class HuggingFaceReference:
    """Hugging Face's model of the checkpoint, in fp32 on the CPU."""

    def __init__(self, source: Source) -> None:
        import transformers

        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self._is_t5 = source.family.name == _T5
        self.name = f"Hugging Face transformers {transformers.__version__}, fp32"
        kind = transformers.AutoModelForSeq2SeqLM if self._is_t5 else transformers.AutoModelForCausalLM
        self._model: Any = kind.from_pretrained(source.archive.path, local_files_only=True, dtype=torch.float32).eval()

    @torch.inference_mode()
    def log_probs(self, prompt: Sequence[int], tokens: Sequence[int]) -> LogProbs:
        """Score; see ``Reference``."""
        if self._is_t5:
            start = self._model.config.decoder_start_token_id
            given = {"input_ids": torch.tensor([prompt]), "decoder_input_ids": torch.tensor([[start, *tokens[:-1]]])}
            logits = self._model(**given).logits[0]
        else:
            logits = self._model(torch.tensor([[*prompt, *tokens]])).logits[0, :-1]
        return _normalised(logits)


class EngineReference:
    """The drop-in engine on one rank of weights that are read again, in fp32."""

    def __init__(self, source: Source, scratch: Path) -> None:
        shutil.rmtree(scratch, ignore_errors=True)
        processes = workers_of(_PROCESSES)
        try:
            convert(ConvertArguments(source.archive.path, scratch, 1, "fp32", processes, allow_nonfinite=True))
            settings = Settings(scratch, 1, 1, "fp32", model_type=MODEL_TYPES[source.family.name])
            self._steps: Steps = load_steps(settings, torch.device("cpu"))[0]
        finally:
            shutil.rmtree(scratch, ignore_errors=True)  # the weights are in memory
        self.name = f"the drop-in engine in fp32, on weights read again from the source ({source.source_map.name})"

    @torch.inference_mode()
    def log_probs(self, prompt: Sequence[int], tokens: Sequence[int]) -> LogProbs:
        """Score; see ``Reference``."""
        config, longest_source = self._steps.config, 0
        ids = [*prompt, *tokens[:-1]]
        if config.encoder is not None:
            ids, longest_source = [config.start_id, *tokens[:-1]], len(prompt)
        count = np.array([len(ids)])
        nothing, source = np.array([-1]), np.array([longest_source])
        self._steps.place(0, count, count, np.array([UNBOUNDED]), source, nothing, nothing)
        if longest_source:
            self._steps.encode(np.array([prompt]), np.array([longest_source]), np.array([-1]), 0)
        hidden = self._steps.extend(np.array([ids]), np.zeros_like(count), count, 0, len(ids), longest_source)
        return _normalised(self._steps.logits(hidden[0]))


def _normalised(logits: torch.Tensor) -> LogProbs:
    log_probs: LogProbs = logits.float().log_softmax(dim=-1).cpu().numpy()
    return log_probs
