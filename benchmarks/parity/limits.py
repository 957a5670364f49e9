"""Hold parity's limits against sound and damaged models of several families, by number format.

    python3 -m benchmarks.parity.limits                            # all of them
    python3 -m benchmarks.parity.limits --families='["demo"]'
    python3 -m benchmarks.parity.limits --defects=planted --csv=planted.csv     # 26 defects, one at a time

``demo`` is the demonstration checkpoint, which is trained. The others are made up, of 12 to 24 layers: transformers'
shapes, and weights that make attention and logits about as sharp as a trained model's. Each is converted to two ranks
by export_scripts.convert and run by the engine in this process; the source is transformers' forward pass in fp32. Every
row is what ``evaluation=parity`` would say: a sound model that does not hold, or a damaged one that does not fail, is
one too many. The planted defects are those of ``benchmarks.parity.planted``, in the demonstration checkpoint.
A T5 (``t5``) is more sensitive than the limits allow for; see docs/accuracy.md.
"""

from __future__ import annotations

import copy
import csv
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from backends.fastertransformer.engine.engine import Engine, open_engine
from backends.fastertransformer.engine.settings import Settings
from benchmarks.parity.damages import DAMAGES, RANKS, Family
from benchmarks.parity.models import FAMILIES, VOCAB, open_family
from benchmarks.parity.planted import PLANTED, Defect, open_shards
from evaluation.client.tokenizer import load_tokenizer
from evaluation.parity.comparison import Position, Served, compare, decide, summarise
from evaluation.parity.distances import PassageFindings
from evaluation.parity.formats import Formats
from evaluation.parity.passages import Passages, Room, Scores, make_more_passages, make_passages
from evaluation.parity.references import HuggingFaceReference, Reference
from evaluation.parity.run import conclude
from evaluation.tasks.metric import FAILS, HOLDS
from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert
from ft_format.weight_format import find_format
from handover.arguments import ScriptArguments
from handover.errors import ConfigError, exit_status, nearest

PROMPTS, LENGTH, OUTPUT = 8, 16, 32
PARITY = Path(__file__).parents[2] / "conf" / "evaluation" / "parity.yaml"
_ROWS = 16  # passages of a request, as parity asks for by default
PLANTED_FORMATS = ("fp32", "fp16", "bf16", "int8")
USUAL, _PLANTED = "usual", "planted"
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

    families: tuple[str, ...] = field(default=(), metadata={"help": "JSON list: demo, gpt_neox, gptj, t5; all but t5"})
    formats: tuple[str, ...] = field(default=(), metadata={"help": "JSON list; all"})
    device: str = field(default="cpu", metadata={"help": "cpu, with two ranks, or cuda, with one"})
    defects: str = field(default=USUAL, metadata={"help": "usual, or planted: many, in the demonstration alone"})
    csv: Path | None = field(default=None, metadata={"help": "file to write"})


_DIGITS = {"max_log_prob_difference": 4, "mean_log_prob_difference": 5, "greedy_agreement": 3, "largest_z": 1}
_DIGITS |= {"passage_log_prob_difference": 5, "passage_rounding": 5, "norm_scale_resolution": 4}


@dataclass(frozen=True)
class Row:
    """What parity makes of a model; ``should`` is what it ought to say."""

    family: str
    format: str
    state: str
    max_log_prob_difference: float
    mean_log_prob_difference: float
    greedy_agreement: float
    passage_log_prob_difference: float
    passage_rounding: float
    largest_z: float
    of_tensor: str
    norm_scale_resolution: float
    passages: int
    by_prompts: str
    by_all: str
    should: str


def main(argv: Sequence[str]) -> None:
    """Print a row a family, format and state; the last line counts what is wrong."""
    arguments = LimitsArguments.from_argv(argv, description=__doc__)
    rows: list[Row] = []
    for name, formats in _wanted(arguments):
        with tempfile.TemporaryDirectory() as directory:
            for row in _look_at(name, formats, arguments, Path(directory)):
                rows.append(row)
                sys.stdout.write(f"{line(row)}\n")
                sys.stdout.flush()
                write(arguments.csv, rows)
    sys.stdout.write(f"{sum(row.by_all != row.should for row in rows)} of {len(rows)} verdicts are wrong\n")


def _wanted(arguments: LimitsArguments) -> list[tuple[str, Sequence[str]]]:
    """Families and formats.

    Raises:
        ConfigError: there is no such family, format or kind of defects, or the family has no such defects.
    """
    is_planted = arguments.defects == _PLANTED
    families = arguments.families or (("demo",) if is_planted else ("demo", "gpt_neox", "gptj"))
    formats = arguments.formats or (PLANTED_FORMATS if is_planted else tuple(_FORMATS))
    for given, legal in (((arguments.defects,), (USUAL, _PLANTED)), (families, FAMILIES), (formats, _FORMATS)):
        for one in given:
            if one not in legal:
                raise ConfigError(f"parity_limits: there is no '{one}'", nearest(one, legal))
    if arguments.device not in ("cpu", "cuda") or (arguments.device == "cuda" and not is_planted):
        raise ConfigError(f"parity_limits: device is {arguments.device}", "cpu, or cuda with --defects=planted")
    if is_planted and families != ("demo",):
        raise ConfigError("parity_limits: the planted defects are the demonstration's", 'take --families=["demo"]')
    return [(name, formats) for name in families]


def line(row: Row) -> str:
    """Return a row as it is printed."""
    return (
        f"{row.family:<9} {row.format:<9} {row.state:<36} differences {row.max_log_prob_difference:.4f}"
        f" {row.mean_log_prob_difference:.5f} {row.greedy_agreement:.3f}, of passages"
        f" {row.passage_log_prob_difference:.5f} {row.passage_rounding:.5f}, scales {row.largest_z:.1f}"
        f" {row.norm_scale_resolution:.4f} ({row.passages}): {row.by_prompts} {row.by_all}"
        f"{'' if row.by_all == row.should else '  WRONG'}"
    )


def write(path: Path | None, rows: Sequence[Row]) -> None:
    """Write the rows that there are, if a file is asked for."""
    if path is None:
        return
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(asdict(rows[0])), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow(
                {
                    name: f"{value:.{_DIGITS[name]}f}" if name in _DIGITS else value
                    for name, value in asdict(row).items()
                }
            )


def _look_at(name: str, formats: Sequence[str], arguments: LimitsArguments, directory: Path) -> Iterator[Row]:
    family, parity = FAMILIES[name], yaml.safe_load(PARITY.read_text("utf-8"))["parity"]
    source, reference = open_family(family, directory)
    device, ranks = torch.device(arguments.device), RANKS if arguments.device == "cpu" else 1
    for number_format in formats:
        weights, data_type, int8_mode, kind = _FORMATS[number_format]
        shards, limits = directory / number_format, parity["limits"][kind]
        convert(ConvertArguments(source, shards, ranks, weights, 2))
        prompts = _prompts(shards, parity["prompts"] if family.build is None else None)
        ways = {"has_process_per_rank": False, "kv_cache_bytes": 1 << 28}
        settings = Settings(*(shards, ranks, 1, data_type, 0, family.model_type, int8_mode), **ways)
        for state, damage, is_sound in _states(arguments.defects, name, number_format):
            damaged = shutil.copytree(shards, directory / "damaged")
            damage(damaged)
            engine = open_engine(replace(settings, checkpoint=damaged), device)
            answers = ask(engine, family, prompts)
            formats_served = Formats(weights, data_type, find_format(int8_mode))
            findings, alike = compare_passages(engine, family, reference, formats_served, parity)
            engine.close()
            shutil.rmtree(damaged)
            yield judge((name, number_format, state), answers, findings, reference, limits, is_sound, alike)


def _plant(defect: Defect, shards: Path) -> None:
    defect.damage(open_shards(shards))


def _inflict(damage: Callable[[Path, Family], None], family: Family, shards: Path) -> None:
    damage(shards, family)


def _states(defects: str, name: str, number_format: str) -> Iterator[tuple[str, Callable[[Path], None], bool]]:
    """Name each state, say what to do to the shards, and whether the model is sound then."""
    if defects == _PLANTED:
        for state, defect in PLANTED.items():
            yield state, partial(_plant, defect), defect.is_harmless
        return
    for state, damage in DAMAGES.items():
        if (state == "drifted" and number_format != "int8") or (state == "positions zeroed" and name != "demo"):
            continue
        yield state, partial(_inflict, damage, FAMILIES[name]), state == "sound"


def judge(
    which: tuple[str, str, str],
    answers: Sequence[Served],
    findings: PassageFindings,
    reference: Reference,
    limits: Mapping[str, float],
    is_sound: bool,
    alike: Reference | None,
) -> Row:
    """Return what parity says of answers and passages by the limits; ``alike`` has weights rounded as the served."""

    def compared(source: Reference) -> list[Position]:
        return [
            position
            for row, served in enumerate(answers)
            for position in compare(row, served, source.log_probs(served.prompt, served.tokens), limits["tie"])
        ]

    positions = compared(reference)
    outcome = decide(positions, limits, compared(alike) if alike else ())
    metrics = {metric.name: metric for metric in (*summarise(positions), *findings.metrics)}
    names = [entry.name for entry in fields(Row) if entry.name in metrics]
    scale = max(findings.scales, key=lambda each: abs(each.z))
    return Row(
        *which,
        **{name: metrics[name].value or 0.0 for name in names},
        largest_z=abs(scale.z),
        of_tensor=scale.tensor,
        passages=metrics["norm_scale_resolution"].n,
        by_prompts=outcome.verdict,
        by_all=conclude(outcome, findings).verdict,
        should=HOLDS if is_sound else FAILS,
    )


def _prompts(shards: Path, texts: Sequence[str] | None) -> list[list[int]]:
    """Parity's own prompts, or made-up ones."""
    if texts is not None:
        tokenizer = load_tokenizer(shards)
        return [tokenizer.encode(text) for text in texts]
    made: list[list[int]] = np.random.default_rng(1).integers(2, VOCAB, (PROMPTS, LENGTH)).tolist()
    return made


def ask(engine: Engine, family: Family, prompts: Sequence[list[int]]) -> list[Served]:
    """Have the engine continue prompts, all at once, and score their tokens, as parity has a server do."""
    is_t5 = family.model_type == "T5"

    def request(prompt: list[int]) -> Any:
        tensors = {
            "input_ids": np.array([prompt], np.uint32),
            "sequence_length" if is_t5 else "input_lengths": np.array([[len(prompt)]], np.uint32),
            "max_output_len" if is_t5 else "request_output_len": np.array([[OUTPUT]], np.uint32),
            "runtime_top_p": np.array([[1e-6]], np.float32),
            "end_id": np.array([[2**31 - 1]], np.uint32),
            **{f"is_return_{what}log_probs": np.array([[True]]) for what in ("", "context_")},
        }
        return engine.parse(tensors)

    answers = []
    for prompt, found in zip(prompts, engine.generate([request(prompt) for prompt in prompts]), strict=True):
        shown = 0 if is_t5 else len(prompt)
        tokens = tuple(found["output_ids"][0, 0, shown : shown + OUTPUT].tolist())
        log_probs = (*found["context_log_probs"][0, 1:].tolist(), *found["output_log_probs"][0, 0].tolist())
        argmax = (*found["context_argmax_ids"][0, 1:].tolist(), *tokens)
        answers.append(Served(tuple(prompt), tokens, log_probs, argmax))
    return answers


def compare_passages(
    engine: Engine, family: Family, reference: HuggingFaceReference, formats: Formats, parity: Mapping[str, Any]
) -> tuple[PassageFindings, Reference | None]:
    """What parity makes of passages, and the source quantized as the engine's; None: it is not quantized."""
    is_t5 = family.model_type == "T5"
    longest = 256 if is_t5 else parity["longest_passage"]
    room = Room(min(reference.vocab_size, engine.config.vocab_size), engine.config.max_pos_seq_len, is_t5)

    def score(passages: Passages) -> Scores:
        starts = range(0, len(passages.tokens), _ROWS)
        return np.concatenate([_scores(engine, passages.rows(start, start + _ROWS)) for start in starts])

    def more(first: int, wanted: int) -> tuple[Passages, Scores]:
        passages = make_more_passages(room, first, wanted, longest)
        return passages, score(passages)

    passages = make_passages(room, parity["passages"], longest)
    alike = copy.deepcopy(reference)
    twin = alike.twin(formats, is_ours=True)
    served = score(passages[0]), score(passages[1])
    findings = twin.compare(passages, served, parity["scale_error"], parity["max_passages"], more)
    return findings, alike if twin.is_quantized else None


def _scores(engine: Engine, passages: Passages) -> Scores:
    """Passages' log probabilities, as Scorer has a server give them."""
    tokens = passages.tokens.astype(np.uint32)
    given = tokens if passages.source is None else passages.source.astype(np.uint32)
    count = len(tokens)
    lengths, none = np.full((count, 1), given.shape[1], np.uint32), np.zeros((count, 1), np.uint32)
    tensors = {"input_ids": given, "is_return_context_log_probs": np.full((count, 1), True)}
    if passages.source is None:
        tensors |= {"input_lengths": lengths, "request_output_len": none}
    else:
        tensors |= {"sequence_length": lengths, "max_output_len": none, "decoder_input_ids": tokens}
        tensors["decoder_input_lengths"] = np.full((count, 1), tokens.shape[1], np.uint32)
    found = engine.generate([engine.parse(tensors)])[0]["context_log_probs"].astype(np.float64)
    return found[:, 1:] if passages.source is None else found


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "parity_limits"))
