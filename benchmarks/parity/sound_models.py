"""How often ``evaluation=divergence`` calls a sound model a damaged one: many models, and two engines for each.

    python3 -m benchmarks.parity.sound_models --csv=sound.csv                          # all of them
    python3 -m benchmarks.parity.sound_models --models='["Qwen3"]' --formats='["bf16"]'

Models are the three demonstrations, which are trained, and made-up ones of transformers' classes, of which every one in
each number format has a seed of its own. Each is converted, and scored by the drop-in engine and by transformers' class
in the served format: the reference has the drop-in engine's kernels, so that only the second rounds in other places, as
another server does. The converted directory is compared with the checkpoint layer by layer too.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from backends.fastertransformer.engine.engine import open_engine
from backends.fastertransformer.engine.settings import Settings
from benchmarks.parity.divergence_rows import (
    TOP,
    Row,
    Subject,
    compare_layers,
    judge,
    read_texts,
    tell_by_engine,
    write_rows,
)
from benchmarks.parity.models import DEMO
from benchmarks.parity.planted_hub import MODELS, VOCAB, Files, HubModel, rewrite
from evaluation.client.tokenizer import load_tokenizer
from evaluation.divergence.corpus import make_passages
from evaluation.divergence.reference import CheckpointReference, open_reference
from evaluation.divergence.stage import Ids, Numbers
from evaluation.divergence.streamed import Scores
from evaluation.parity.arguments import HUGGING_FACE
from evaluation.parity.references import HuggingFaceReference
from evaluation.parity.references import open_reference as open_parity
from evaluation.tasks.metric import FAILS, HOLDS
from export_scripts.arguments import HUGGINGFACE, ConvertArguments
from export_scripts.checkpoints.user_files import NOTHING_GIVEN
from export_scripts.convert import convert
from handover.arguments import ScriptArguments
from handover.errors import exit_status

_GPT, _TRAINED, _LONGEST = "gpt3_demo", ("gpt3_demo", "llama_demo", "moe_demo"), 256
_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_HEAD, _TIED = {"head_dim": 32}, {"head_dim": 32, "tie_word_embeddings": True, "query_pre_attn_scalar": 32}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
_DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
    **{"full_attention_interval": 3, "shared_expert_intermediate_size": 128},
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
_GRANITE = {
    "attention_multiplier": 0.25,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}
_SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
_MADE_UP: dict[str, dict[str, Any]] = {
    **{model.architecture: model.values for model in MODELS.values()},
    "Qwen2": {},
    "Qwen3": _HEAD,
    "Mistral": {**_HEAD, "sliding_window": 64},
    "Gemma2": {**_TIED, "sliding_window": 64, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "Gemma3Text": {**_TIED, "sliding_window": 64, "sliding_window_pattern": 2},
    "Olmo2": {},
    "Granite": _GRANITE,
    "Phi3": {},
    "SmolLM3": {"no_rope_layers": [1, 0, 1, 0]},
    "Starcoder2": {"sliding_window": 64},
    "Nemotron": _HEAD,
    "Mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "Qwen3Moe": {**_HEAD, **_EXPERTS},
    "Qwen3Next": {**_HEAD, **_EXPERTS, **_DELTA},
}
"""transformers' class -> what differs from ``planted_hub``'s sizes."""


@dataclass(frozen=True)
class SoundArguments(ScriptArguments):
    """What is looked at."""

    models: tuple[str, ...] = field(default=(*_TRAINED, *_MADE_UP), metadata={"help": "JSON list"})
    formats: tuple[str, ...] = field(default=("bf16", "fp16", "fp32"), metadata={"help": "JSON list"})
    passages: int = field(default=16, metadata={"help": "of up to 256 tokens"})
    seed: int = field(default=0, metadata={"help": "of the first model"})
    csv: Path | None = field(default=None, metadata={"help": "file to write"})


def main(argv: Sequence[str]) -> None:
    """Print a row for each model and engine; the last line counts false alarms."""
    arguments = SoundArguments.from_argv(argv, description=__doc__)
    rows, seed = list[Row](), arguments.seed
    for number_format in arguments.formats:
        for name in arguments.models:
            begin = time.monotonic()
            with tempfile.TemporaryDirectory() as directory:
                for row in _judged(name, number_format, seed, arguments.passages, Path(directory)):
                    rows.append(row)
                    said = f"{row.mean_kl:.3g} / {row.kl_of_format:.3g} = {row.ratio:.3g} flips {row.flips:.2%}"
                    wrong = "  FALSE ALARM" if FAILS in (row.by_texts, row.by_all) else ""
                    named = f"{row.model:<12} {row.format:<5} {row.state:<22}"
                    sys.stdout.write(f"{named} {said} {row.by_texts} {row.by_all} {row.evidence}{wrong}\n")
                    sys.stdout.flush()
                    write_rows(arguments.csv, rows)
            sys.stderr.write(f"{name} in {number_format}: {time.monotonic() - begin:.0f} s\n")
            seed += 1
    models = len({(row.model, row.format, row.state.split(" by ")[0]) for row in rows})
    false = sum(FAILS in (row.by_texts, row.by_all) for row in rows)
    unsure = sum(row.by_all != HOLDS for row in rows) - false
    sys.stdout.write(f"{models} sound models, {len(rows)} verdicts: {false} false alarms, {unsure} inconclusive\n")


def _judged(name: str, number_format: str, seed: int, passages: int, directory: Path) -> Iterator[Row]:
    source, served = directory / "source", directory / "served"
    if name in _TRAINED:
        source = DEMO.parents[1] / name / "checkpoints"
    else:
        HubModel(name, {**_SMALL, **_MADE_UP[name]}).save(source, seed)
        rewrite(source, partial(_make_uneven, seed=seed))
    has_shards = name == _GPT
    convert(
        ConvertArguments(source, served, 1, number_format)
        if has_shards
        else ConvertArguments(source, served, 1, number_format, format=HUGGINGFACE)
    )
    reference = open_reference(source, directory / "references", NOTHING_GIVEN)
    subject = Subject(name, Numbers(number_format), reference, served)
    texts = _passages(name, served, seed, passages)
    weights = compare_layers(subject, served, texts)
    for engine, tell in (
        ("the drop-in engine", partial(_tell_by_ours, reference, served, number_format)),
        ("transformers", partial(_tell_by_transformers, source if has_shards else served, directory, number_format)),
    ):
        state = f"seed {seed} by {engine}" if name not in _TRAINED else f"trained by {engine}"
        yield judge(subject, state, tell(texts), texts, weights, ("", True))
    reference.close()


def _make_uneven(files: Files, seed: int) -> None:
    """Make norms other than 1 and biases other than 0, as they are in trained models."""
    torch.manual_seed(1000 + seed)
    for name, x in files.items():
        if x.dim() == 1 and ("norm" in name or name.endswith("proj.bias")):
            files[name] = x + 0.1 * torch.randn(x.shape)


def _passages(name: str, served: Path, seed: int, count: int) -> list[Ids]:
    if name not in _TRAINED:
        drawn = np.random.default_rng(seed).integers(2, VOCAB, 60_000).tolist()
        return make_passages([tuple(drawn)], None, _LONGEST, count, 1 << 30)
    return make_passages(read_texts(), load_tokenizer(served), _LONGEST, count, 1 << 30)


def _tell_by_ours(reference: CheckpointReference, served: Path, number_format: str, passages: Sequence[Ids]) -> Scores:
    engine = open_engine(Settings(served, 1, 1, number_format, 0, reference.model_type), torch.device("cpu"))
    try:
        return tell_by_engine(engine, passages)
    finally:
        engine.close()


@torch.inference_mode()
def _tell_by_transformers(path: Path, scratch: Path, number_format: str, passages: Sequence[Ids]) -> Scores:
    if path == DEMO:
        source = open_parity(DEMO, HUGGING_FACE, scratch / "scratch")[0]
        assert isinstance(source, HuggingFaceReference), "GPT-2 computes it"
        model: Any = source.model.to(_TYPES[number_format])
    else:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype=_TYPES[number_format]).eval()
    parts: list[list[Tensor]] = [[], [], []]
    for row in passages:
        log_probs = model(torch.tensor([row])).logits[0, :-1].float().log_softmax(-1)
        top, ids = log_probs.topk(TOP, -1)
        for part, found in zip(
            parts, (log_probs.gather(1, torch.tensor(row[1:])[:, None])[:, 0], ids, top), strict=True
        ):
            part.append(found)
    own, ids, top = (torch.cat(part).numpy() for part in parts)
    return Scores(own, ids.astype(np.int32), top)


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "sound_models"))
