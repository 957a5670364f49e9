"""Hold parity's limits against sound and damaged models of several families, by number format.

    python3 -m benchmarks.parity_limits                            # all of them
    python3 -m benchmarks.parity_limits --families='["demo"]'

``demo`` is the demonstration checkpoint, which is trained. The others are made up, of 12 to 24 layers: transformers'
shapes, and weights that make attention and logits about as sharp as a trained model's. Each is converted to two ranks
by export_scripts.convert and run by the engine in this process; the source is transformers' forward pass in fp32. Every
row is what ``evaluation=parity`` would say: a sound model that fails, or a damaged one that holds, is one too many.
A T5 (``t5``) is more sensitive than the limits allow for; see docs/measuring.md.
"""

from __future__ import annotations

import copy
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from backends.fastertransformer.engine.engine import Engine, open_engine
from backends.fastertransformer.engine.settings import Settings
from benchmarks.parity_damages import DAMAGES, HEADS, HIDDEN, RANKS, Family
from evaluation.client.tokenizer import load_tokenizer
from evaluation.parity.arguments import HUGGING_FACE
from evaluation.parity.comparison import FAILS, HOLDS, Served, compare, decide, summarise
from evaluation.parity.formats import Formats
from evaluation.parity.passages import Passages, Room, make_passages
from evaluation.parity.references import HuggingFaceReference, Reference, open_reference
from evaluation.parity.run import conclude
from evaluation.parity.twin import Findings
from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert
from handover.arguments import ScriptArguments
from handover.errors import exit_status

VOCAB, LOGIT_SPREAD, SHARPNESS = 2000, 3.0, 4.0
PROMPTS, LENGTH, OUTPUT = 8, 16, 32
PROJECT = Path(__file__).parent.parent
DEMO, PARITY = PROJECT / "examples" / "gpt3_demo" / "checkpoints", PROJECT / "conf" / "evaluation" / "parity.yaml"
_OUTPUTS = (
    "attention.dense.weight",
    "dense_4h_to_h.weight",
    "out_proj.weight",
    "fc_out.weight",
    ".o.weight",
    "wo.weight",
)
# weight_data_type, data_type, int8_mode, and whose limits apply
_FORMATS = {
    "fp32": ("fp32", "fp32", 0, "fp32"),
    "fp16": ("fp16", "fp16", 0, "fp16"),
    "bf16": ("bf16", "bf16", 0, "bf16"),
    "fp16-bf16": ("fp16", "bf16", 0, "bf16"),
    "int8": ("fp16", "fp16", 1, "int8"),
    "bf16-int8": ("bf16", "bf16", 1, "int8"),
}


@dataclass(frozen=True)
class LimitsArguments(ScriptArguments):
    """What is looked at."""

    families: tuple[str, ...] = field(default=("demo", "gpt_neox", "gptj"), metadata={"help": "JSON list; t5 too"})
    formats: tuple[str, ...] = field(default=tuple(_FORMATS), metadata={"help": "JSON list"})


def _neox(layers: int) -> Any:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_hidden_layers": layers}
    more = {"intermediate_size": 4 * HIDDEN, "max_position_embeddings": 128, "hidden_act": "gelu_fast"}
    return GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=VOCAB, bos_token_id=0, eos_token_id=1, **sizes, **more))


def _gptj(layers: int) -> Any:
    from transformers import GPTJConfig, GPTJForCausalLM

    sizes = {"n_embd": HIDDEN, "n_head": HEADS, "n_layer": layers, "rotary_dim": 16, "n_positions": 128}
    return GPTJForCausalLM(GPTJConfig(vocab_size=VOCAB, bos_token_id=0, eos_token_id=1, **sizes))


def _t5(layers: int) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": HIDDEN, "num_heads": HEADS, "d_kv": HIDDEN // HEADS, "d_ff": 4 * HIDDEN, "num_layers": layers}
    more = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, **sizes, **more))


_T5_LAYER = "decoder.block.6.layer."
FAMILIES = {
    "demo": Family(
        *("GPT", 6, None, "model.layers.3.attention.query_key_value.weight"),
        "model.layers.3.mlp.dense_h_to_4h.weight",
        *("model.layers.2.post_attention_layernorm.weight", "model.final_layernorm.weight"),
    ),
    "gpt_neox": Family(
        *("GPT-NeoX", 24, _neox, "model.layers.12.attention.query_key_value.weight"),
        "model.layers.12.mlp.dense_h_to_4h.weight",
        *("model.layers.12.input_layernorm.weight", "model.final_layernorm.weight"),
    ),
    "gptj": Family(
        *("GPT-J", 16, _gptj, "model.layers.8.attention.query_key_value.weight"),
        "model.layers.8.mlp.dense_h_to_4h.weight",
        *("model.layers.8.input_layernorm.weight", "model.final_layernorm.weight"),
    ),
    "t5": Family(
        *("T5", 12, _t5, f"{_T5_LAYER}0.SelfAttention.qkv.weight"),
        f"{_T5_LAYER}2.DenseReluDense.wi.weight",
        f"{_T5_LAYER}0.layer_norm.weight",
        "decoder.final_layer_norm.weight",
    ),
}


def main(argv: Sequence[str]) -> None:
    """Print a row a family, format and state; the last line counts what is wrong."""
    arguments, wrong = LimitsArguments.from_argv(argv, description=__doc__), 0
    parity = yaml.safe_load(PARITY.read_text("utf-8"))["parity"]
    heads = {"family": -9, "format": -9, "state": -18, "max": 8, "mean": 9, "greedy": 7, "passages": 9, "rounding": 9}
    heads |= {"z": 6, "norms": 7}
    cells = (f"{head:<{-width}}" if width < 0 else f"{head:>{width}}" for head, width in heads.items())
    sys.stdout.write(f"{' '.join(cells)}  by prompts, by all\n")
    for name in arguments.families:
        with tempfile.TemporaryDirectory() as directory:
            wrong += _look_at(name, FAMILIES[name], arguments.formats, parity, Path(directory))
    sys.stdout.write(f"{wrong} verdicts are wrong\n")


def _look_at(name: str, family: Family, formats: Sequence[str], parity: Any, directory: Path) -> int:
    source, reference, wrong = *_source(family, directory), 0
    for number_format in formats:
        weights, data_type, int8_mode, kind = _FORMATS[number_format]
        shards, limits = directory / number_format, parity["limits"][kind]
        convert(ConvertArguments(source, shards, RANKS, weights, 2))
        prompts = _prompts(shards, parity["prompts"] if family.build is None else None)
        settings = Settings(*(shards, RANKS, 1, data_type, 0, family.model_type, int8_mode), has_process_per_rank=False)
        for state, damage in DAMAGES.items():
            if (state == "drifted" and number_format != "int8") or (state == "positions zeroed" and name != "demo"):
                continue
            damaged = shutil.copytree(shards, directory / "damaged")
            damage(damaged, family)
            engine = open_engine(replace(settings, checkpoint=damaged), torch.device("cpu"))
            answers = [_ask(engine, family, prompt) for prompt in prompts]
            findings = _compare_passages(engine, family, reference, Formats(weights, data_type, str(int8_mode)))
            engine.close()
            shutil.rmtree(damaged)
            positions = [
                position
                for row, served in enumerate(answers)
                for position in compare(row, served, reference.log_probs(served.prompt, served.tokens), limits["tie"])
            ]
            outcome = decide(positions, limits)
            verdict = conclude(outcome, findings).verdict
            figures = {metric.name: metric.value or 0.0 for metric in summarise(positions)}
            figures |= {metric.name: metric.value or 0.0 for metric in findings.metrics}
            is_wrong = verdict != (HOLDS if state == "sound" else FAILS)
            wrong += is_wrong
            sys.stdout.write(
                f"{name:<9} {number_format:<9} {state:<18} {figures['max_log_prob_difference']:8.4f}"
                f" {figures['mean_log_prob_difference']:9.5f} {figures['greedy_agreement']:7.3f}"
                f" {figures['passage_log_prob_difference']:9.5f} {figures['passage_rounding']:9.5f}"
                f" {max(abs(scale.z) for scale in findings.scales):6.1f} {figures['norm_scale_resolution']:7.4f}"
                f"  {outcome.verdict} {verdict}"
                f"{'  WRONG' if is_wrong else ''}\n"
            )
            sys.stdout.flush()
    return wrong


def _source(family: Family, directory: Path) -> tuple[Path, Reference]:
    """The checkpoint to convert, and what computes it."""
    if family.build is None:
        return DEMO, open_reference(DEMO, HUGGING_FACE, directory / "scratch")[0]
    model = sharpened(family.build(family.layers), family.layers, family.model_type == "T5")
    model.save_pretrained(directory / "source")
    return directory / "source", HuggingFaceReference("transformers", model, family.model_type == "T5")


def _prompts(shards: Path, texts: Sequence[str] | None) -> list[list[int]]:
    """Parity's own prompts, or made-up ones."""
    if texts is not None:
        tokenizer = load_tokenizer(shards)
        return [tokenizer.encode(text) for text in texts]
    made: list[list[int]] = np.random.default_rng(1).integers(2, VOCAB, (PROMPTS, LENGTH)).tolist()
    return made


@torch.no_grad()
def sharpened(model: Any, layers: int, is_t5: bool) -> Any:
    """Make attention and logits as sharp as a trained model's: initial weights attend evenly and prefer nothing."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue
        parameter.normal_(0, parameter.shape[-1] ** -0.5)  # what goes through keeps its size
        if any(part in name for part in ("q_proj", "k_proj", "SelfAttention.q", "SelfAttention.k")):
            parameter *= SHARPNESS**0.5 / (HIDDEN // HEADS) ** (0.25 if is_t5 else 0)
        if "query_key_value" in name:  # of each head q, k, v
            parameter.view(HEADS, 3, -1, parameter.shape[-1])[:, :2] *= SHARPNESS**0.5
        if name.endswith(_OUTPUTS):  # GPT-2's way: so deep a sum keeps its size too
            parameter *= (2 * layers) ** -0.5
    head = model.get_output_embeddings()
    head.weight *= LOGIT_SPREAD
    return model.eval()


def _ask(engine: Engine, family: Family, prompt: list[int]) -> Served:
    """Have the engine continue a prompt and score its tokens, as parity has a server do."""
    is_t5 = family.model_type == "T5"
    tensors = {
        "input_ids": np.array([prompt], np.uint32),
        "sequence_length" if is_t5 else "input_lengths": np.array([[len(prompt)]], np.uint32),
        "max_output_len" if is_t5 else "request_output_len": np.array([[OUTPUT]], np.uint32),
        "runtime_top_p": np.array([[1e-6]], np.float32),
        "end_id": np.array([[2**31 - 1]], np.uint32),
        **{f"is_return_{what}log_probs": np.array([[True]]) for what in ("", "context_")},
    }
    found = engine.generate([engine.parse(tensors)])[0]
    shown = 0 if is_t5 else len(prompt)
    tokens = tuple(found["output_ids"][0, 0, shown : shown + OUTPUT].tolist())
    log_probs = (*found["context_log_probs"][0, 1:].tolist(), *found["output_log_probs"][0, 0].tolist())
    argmax = (*found["context_argmax_ids"][0, 1:].tolist(), *tokens)
    return Served(tuple(prompt), tokens, log_probs, argmax)


def _compare_passages(engine: Engine, family: Family, reference: Reference, formats: Formats) -> Findings:
    """What parity makes of passages."""
    assert isinstance(reference, HuggingFaceReference)
    is_t5 = family.model_type == "T5"
    room = Room(min(reference.vocab_size, engine.config.vocab_size), engine.config.max_pos_seq_len, is_t5)
    passages = make_passages(room, 48, 256 if is_t5 else 2048)
    served = tuple(np.array([_scores(engine, part, row) for row in range(len(part.tokens))]) for part in passages)
    twin = copy.deepcopy(reference).twin(formats, is_ours=True)
    return twin.compare(passages, (served[0], served[1]), 0.02)


def _scores(engine: Engine, passages: Passages, row: int) -> Any:
    """One passage's log probabilities, as Scorer has a server give them."""
    tokens = passages.tokens[row : row + 1].astype(np.uint32)
    given = tokens if passages.source is None else passages.source[row : row + 1].astype(np.uint32)
    lengths = np.array([[given.shape[1]]], np.uint32)
    tensors = {"input_ids": given, "is_return_context_log_probs": np.array([[True]])}
    if passages.source is None:
        tensors |= {"input_lengths": lengths, "request_output_len": np.array([[0]], np.uint32)}
    else:
        tensors |= {"sequence_length": lengths, "max_output_len": np.array([[0]], np.uint32)}
        tensors |= {"decoder_input_ids": tokens, "decoder_input_lengths": np.array([[tokens.shape[1]]], np.uint32)}
    found = engine.generate([engine.parse(tensors)])[0]["context_log_probs"][0]
    return found[1:] if passages.source is None else found


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "parity_limits"))
