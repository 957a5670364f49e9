"""Transformers' logits are the oracle of the reference, of every architecture, in every type and Megatron's form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from support.checkpoints import core_delta_rule, falcon_models, hybrid_models, megatron_checkpoints
from support.checkpoints.llama_sources import Case, write_source
from support.shards.gpt2_checkpoint import random_gpt2
from support.tiny_models import huggingface_models, llama_models
from transformers import AutoModelForCausalLM

from evaluation.divergence import stage
from evaluation.divergence.reference import CheckpointReference, open_reference
from evaluation.divergence.stage import Numbers
from export_scripts.checkpoints.user_files import NOTHING_GIVEN

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
Floats = npt.NDArray[np.float64]
Rows = Sequence[tuple[int, ...]]
ARCHITECTURES = Path(__file__).parents[2] / "models" / "architectures"
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MEGATRON = "Megatron"
LIMIT = 1e-5  # in fp32: of the largest log probability, or of one
DELTA, DELTA_LIMIT = ("qwen3_next", "qwen3_5", "qwen3_5_moe"), 3e-5  # transformers is 6e-6 from its own in fp64
LEAST, MOST = 0.25, 1.6  # median KL that a type alone makes, to that of transformers in it: 0.38 to 1.1
LENGTHS = (33, 2, 17, 20)
CONVERTED = ("gpt2", "gpt_bigcode", "gptj", "bloom", "opt", "xglm", "gpt_neox")
# Forms of Megatron that say all that the model is; one of them suffices here, tests/convert has the others.
FORMS = {
    **dict.fromkeys(("gemma", "gemma2"), "NeMo 2"),
    **dict.fromkeys(("phi3_plain", "llama4_scout"), "Bridge"),
    "exaone_moe": "Bridge, layers apart",  # they are not alike
    **dict.fromkeys(("llama", "llama31", "llama32", "mistral", "nemotron", "qwen2", "qwen3", "olmo2"), "Megatron-LM"),
    **dict.fromkeys(("exaone4_full", "mixtral", "qwen3_moe", "olmoe", "glm4_moe", "minimax_m2"), "Megatron-LM"),
    **dict.fromkeys(("ernie4_5_moe", "deepseek_v3", "moonlight", "glm4_moe_lite", "deepseek_v2"), "Megatron-LM"),
    **dict.fromkeys(("gpt_oss", "llama4_plain", "starcoder2"), "Megatron-LM"),
}
HYBRIDS: dict[str, Callable[..., Path]] = {
    **dict.fromkeys(("nemotron_h", "nemotron3", "nemotron3_latent"), hybrid_models.write_ranks),
    **dict.fromkeys(("falcon_h1", "falcon_h1_norm"), falcon_models.write_falcon),
    **dict.fromkeys(("qwen3_next", "qwen3_5"), core_delta_rule.write_ranks),
    "qwen3_5_moe": core_delta_rule.write_bridge_of_images,
}
WITHOUT_MEGATRON = {"gemma3_text", "granite", "smollm3"}
"""Architectures of which no helper writes a form of Megatron's."""


def model_type(name: str) -> str:
    import transformers

    config = getattr(transformers, f"{llama_models.MODELS[name][0]}Config")
    return str(config.model_type)


def forms_of(name: str) -> list[str]:
    return [*TYPES, *([MEGATRON] if name in FORMS or name in HYBRIDS or name == "gpt2" else [])]


def cases() -> list[Any]:
    """Every model in every form; by day each architecture in one of them, where fp16 is slow."""
    seen, made = set[str](), list[Any]()
    for name in (*llama_models.MODELS, *CONVERTED):
        architecture = name if name in CONVERTED else model_type(name)
        forms = forms_of(name)
        by_day = [form for form in forms if form != "fp16" or architecture == "llama"]
        chosen = None if architecture in seen else by_day[len(seen) % len(by_day)]
        seen.add(architecture)
        for form in forms:
            made.append(pytest.param(name, form, marks=() if form == chosen else pytest.mark.long, id=f"{name} {form}"))
    return made


@pytest.fixture(autouse=True)
def several_batches_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "BATCH_TOKENS", 40)


@torch.no_grad()
def told(model: Any, rows: Rows) -> Floats:
    """Return transformers' log probabilities of the whole vocabulary."""
    places = [model(torch.tensor([row])).logits[0, :-1].double().log_softmax(-1) for row in rows]
    return torch.cat(places).numpy()


def streamed(reference: CheckpointReference, rows: Rows, numbers: Numbers, vocabulary: int) -> Floats:
    """Return the reference's, of tokens that the vocabulary has: Megatron pads it, and shards have the padding too."""
    scores = reference.scores(rows, 2 * vocabulary, numbers)
    found = np.empty(scores.top.shape)
    np.put_along_axis(found, scores.top_ids.astype(np.int64), scores.top.astype(np.float64), 1)
    tokens = np.concatenate([row[1:] for row in rows])
    assert (scores.log_probs == found[np.arange(len(found)), tokens].astype(np.float32)).all()
    return torch.from_numpy(found[:, :vocabulary]).log_softmax(-1).numpy()


def divergence(p: Floats, q: Floats) -> float:
    return float(np.median((np.exp(p) * (p - q)).sum(1)))


def check(reference: CheckpointReference, rows: Rows, expected: Floats, limit: float) -> None:
    found = streamed(reference, rows, Numbers(), expected.shape[1])
    assert np.abs(found - expected).max() < limit * max(1.0, np.abs(expected).max())
    assert (found.argmax(1) == expected.argmax(1)).all()


@pytest.mark.parametrize(("name", "form"), cases())
def test_the_reference_is_what_transformers_computes(name: str, form: str, tmp_path: Path) -> None:
    limit = DELTA_LIMIT if name in DELTA else LIMIT
    if form == MEGATRON:
        path, rows, expected = write_megatron(name, tmp_path / "source")
        reference = open_reference(path, tmp_path / "references", NOTHING_GIVEN)
        check(reference, rows, expected, limit)
    else:
        path, dtype = tmp_path / "source", TYPES[form]
        helper: Any = huggingface_models if name in CONVERTED else llama_models
        helper.save(name, path, dtype=dtype)
        reference = open_reference(path, tmp_path / "references", NOTHING_GIVEN)
        most = reference.open(Numbers()).config.max_pos_seq_len  # with longrope transformers' angles are others beyond
        rng = np.random.default_rng(3)
        rows = [tuple(rng.integers(3, helper.VOCAB, min(length, most)).tolist()) for length in LENGTHS]
        expected = told(loaded(path, torch.float32), rows)
        check(reference, rows, expected, limit)
        if form != "fp32":  # in the stored type both round, and in different places
            own, theirs = streamed(reference, rows, Numbers(form), helper.VOCAB), told(loaded(path, dtype), rows)
            ratio = divergence(expected, own) / divergence(expected, theirs)
            assert LEAST < ratio < MOST
    reference.close()
    assert not list(reference.directory.glob("weights*"))


def loaded(path: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()


def write_megatron(name: str, folder: Path) -> tuple[Path, Rows, Floats]:
    """Write a model as two ranks saved it -> the path to give, texts, and what transformers says of them."""
    if name == "gpt2":
        model = random_gpt2(n_layer=megatron_checkpoints.LAYERS, n_positions=megatron_checkpoints.POSITIONS)
        rows = [(5, 9, 60, 3, 3, 90, 14), (7, 1, 2)]
        return megatron_checkpoints.write(folder, model, 3.0, (2, 1)), rows, told(model, rows)
    if name in HYBRIDS:
        source = hybrid_models.hybrid(name)
        path = HYBRIDS[name](folder, source, 2)
    else:
        case = Case(name, FORMS[name], 2)
        source, path = case.source, write_source(case, folder)
    logits = torch.from_numpy(source.logits[:, :-1]).double()
    rows = [tuple(row) for row in llama_models.input_ids().tolist()]
    return path, rows, logits.log_softmax(-1).flatten(0, 1).numpy()


def test_no_architecture_is_left_out() -> None:
    known = {file.stem for file in ARCHITECTURES.glob("[!_]*.py")}
    assert {model_type(name) for name in llama_models.MODELS} == known
    assert {model_type(name) for name in (*FORMS, *HYBRIDS)} == known - WITHOUT_MEGATRON
