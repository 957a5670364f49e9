"""What divergence, and LAMBADA, find of planted defects, and how often a sound model is called a damaged one.

    python3 -m benchmarks.parity.divergence_power --csv=power.csv                # all models, formats and defects
    python3 -m benchmarks.parity.divergence_power --models='["demo"]' --formats='["bf16"]'

``demo`` is the demonstration checkpoint with the 26 defects of ``benchmarks.parity.planted``, scored on the package's
texts; what parity finds of them is in ``results/reference/parity``. The others are made up (``planted_hub``), scored on
random tokens. The engine runs in this process; the reference on a GPU if there is one. A sound model is looked at on
several draws of the passages. Every row is what ``evaluation=divergence`` says, by 20 log probabilities of a place.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from backends.fastertransformer.engine.engine import Engine, open_engine
from backends.fastertransformer.engine.settings import Settings
from benchmarks.parity.divergence_rows import (
    Row,
    Subject,
    compare_layers,
    judge,
    read_texts,
    tell_by_engine,
    write_rows,
)
from benchmarks.parity.models import DEMO
from benchmarks.parity.planted import PLANTED, open_shards
from benchmarks.parity.planted_hub import LONGEST, MODELS, VOCAB, change_tensors, rewrite
from evaluation.client.tokenizer import load_tokenizer
from evaluation.divergence.corpus import make_passages
from evaluation.divergence.reference import open_reference
from evaluation.divergence.stage import Ids, Numbers
from evaluation.tasks.metric import FAILS, HOLDS
from export_scripts.arguments import HUGGINGFACE, ConvertArguments
from export_scripts.checkpoints.user_files import NOTHING_GIVEN
from export_scripts.convert import convert
from ft_format.weight_format import INT8, NONE
from handover.arguments import ScriptArguments
from handover.errors import exit_status

_DEMO, _SOUND = "demo", "sound"
_LAMBADA = Path(__file__).parents[2] / "examples" / "data" / "lambada_subset.jsonl"
_FP8, _WITH_FP8 = ("fp8", "fp8_block"), ("angles", "experts and latent attention")
_SCALES = {
    name: change_tensors(r"(weight_scale|weight_scale_inv)", change)
    for name, change in {
        "scales of the next row or block": lambda x: x.roll(1, 0),
        "scales x 1.02": lambda x: 1.02 * x,
        "scales of all are the first": lambda x: x[:1, :1].expand(x.shape).clone(),
    }.items()
}
_CACHE_BYTES = 1 << 28
_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class PowerArguments(ScriptArguments):
    """What is looked at."""

    models: tuple[str, ...] = field(default=(_DEMO, *MODELS), metadata={"help": "JSON list"})
    formats: tuple[str, ...] = field(default=("fp32", "fp16", "bf16", "int8", *_FP8), metadata={"help": "JSON list"})
    passages: int = field(default=64, metadata={"help": "of up to 256 tokens"})
    sound: int = field(default=3, metadata={"help": "draws of passages for each sound model"})
    lambada: int = field(default=100, metadata={"help": "texts; 0: it is not run"})
    part: tuple[int, ...] = field(default=(0, 1), metadata={"help": "JSON [i, n]: every nth state from the ith on"})
    only_sound: bool = field(default=False, metadata={"help": "no defects"})
    device: str = field(default="cpu", metadata={"help": "cpu or cuda, for what is served"})
    csv: Path | None = field(default=None, metadata={"help": "file to write"})


@dataclass(frozen=True)
class Planted(Subject):
    """A model with what is done to it.

    Attributes:
        states: by name what is done to a copy of the served directory, and whether it is sound then.
        draw: the passages of a draw.
        texts: of LAMBADA, tokens with the number of those of the last word; none without a tokenizer.
    """

    states: dict[str, tuple[Callable[[Path], None], bool]]
    draw: Callable[[int], list[Ids]]
    texts: Sequence[tuple[Ids, int]] = ()


def main(argv: Sequence[str]) -> None:
    """Print a row for each model, format and state; the last line counts what is wrong."""
    arguments = PowerArguments.from_argv(argv, description=__doc__)
    rows: list[Row] = []
    for name in arguments.models:
        for number_format in arguments.formats:
            if number_format == INT8.name and name != _DEMO or number_format in _FP8 and name not in _WITH_FP8:
                continue  # int8 is for shards, FP8 for directories whose matrices it quantizes
            with tempfile.TemporaryDirectory() as directory:
                for row in _look_at(_open(name, number_format, arguments, Path(directory)), arguments, Path(directory)):
                    rows.append(row)
                    wrong = "" if (row.by_all == FAILS) == (row.should == FAILS) else "  WRONG"
                    said = f"{row.mean_kl:.3g} / {row.kl_of_format:.3g} = {row.ratio:.3g} flips {row.flips:.2%}"
                    verdicts = f"{row.by_texts} {row.by_all} {row.cause} lambada {row.lambada}{wrong}"
                    sys.stdout.write(f"{row.model:<28} {row.format:<5} {row.state:<38} {said} {verdicts}\n")
                    sys.stdout.flush()
                    write_rows(arguments.csv, rows)
    wrong = sum((row.by_all == FAILS) != (row.should == FAILS) for row in rows)
    alarms = [row for row in rows if row.should == HOLDS]
    false = sum(row.by_all == FAILS for row in alarms)
    sys.stdout.write(f"{wrong} of {len(rows)} verdicts are wrong; false alarms {false} of {len(alarms)}\n")


def _open(name: str, number_format: str, arguments: PowerArguments, directory: Path) -> Planted:
    source, served = directory / "source", directory / "served"
    data_type = {INT8.name: "fp16", **dict.fromkeys(_FP8, "bf16")}.get(number_format, number_format)
    quantization = number_format if number_format in _FP8 else ""
    numbers = Numbers(data_type, INT8 if number_format == INT8.name else NONE, quantization=quantization)
    states: dict[str, tuple[Callable[[Path], None], bool]] = {_SOUND: (lambda shards: None, True)}
    if name == _DEMO:
        convert(ConvertArguments(DEMO, served, 1, data_type))
        for state, defect in PLANTED.items():
            states[state] = (partial(_plant, defect.damage), defect.is_harmless)
        tokenizer = load_tokenizer(served)
        documents = [tuple(tokenizer.encode(text)) for text in read_texts()]
        reference = open_reference(DEMO, directory / "references", NOTHING_GIVEN)
        texts = []
        for line in _LAMBADA.read_text().splitlines()[: arguments.lambada]:
            text = json.loads(line)["text"]
            before = tokenizer.encode(text.rsplit(" ", 1)[0])
            texts.append((tuple(tokenizer.encode(text)), len(tokenizer.encode(text)) - len(before)))
    else:
        model = MODELS[name]
        model.save(source)
        if quantization:
            convert(ConvertArguments(source, served, 1, data_type, format=HUGGINGFACE, quantization=quantization))
        else:
            shutil.copytree(source, served)
            rewrite(served, lambda files: files.update({key: x.to(_TYPES[data_type]) for key, x in files.items()}))
        states |= {state: (damage, False) for state, damage in (_SCALES if quantization else model.defects).items()}
        rng = np.random.default_rng(1)
        documents = [tuple(rng.integers(2, VOCAB, 60_000).tolist())]
        reference, texts = open_reference(source, directory / "references", NOTHING_GIVEN), []

    def draw(number: int) -> list[Ids]:
        own = [each[number * len(each) // arguments.sound :] for each in documents]
        return make_passages(own, None, min(256, LONGEST), arguments.passages, 1 << 30)

    return Planted(name, numbers, reference, served, states, draw, texts)


def _plant(damage: Callable[..., None], shards: Path) -> None:
    damage(open_shards(shards))


def _look_at(subject: Planted, arguments: PowerArguments, directory: Path) -> Iterator[Row]:
    usual: list[bool] | None = None
    first, step = arguments.part
    for state, (damage, is_sound) in list(subject.states.items())[first : 1 if arguments.only_sound else None : step]:
        copied = shutil.copytree(subject.served, directory / "damaged")
        damage(copied)
        numbers = subject.numbers
        given = (copied, 1, 1, numbers.data_type, 0, subject.reference.model_type, numbers.weights.mode)
        settings = Settings(*given, kv_cache_bytes=_CACHE_BYTES)  # by itself it would take what a GPU has
        engine = open_engine(settings, torch.device(arguments.device))
        hits = [] if arguments.only_sound else _last_words(engine, subject.texts)
        usual = usual or _usual(subject, settings, hits, state, arguments.device)
        lambada = _fallen(usual, hits) if hits else ""
        for number in range(arguments.sound if state == _SOUND else 1):
            passages = subject.draw(number)
            told, weights = tell_by_engine(engine, passages), compare_layers(subject, copied, passages)
            yield judge(subject, state, told, passages, weights, (lambada, is_sound))
        engine.close()
        shutil.rmtree(copied)


def _usual(subject: Planted, settings: Settings, hits: list[bool], state: str, device: str) -> list[bool]:
    """Return what the sound model knows of LAMBADA."""
    if not hits or state == _SOUND:
        return hits
    engine = open_engine(replace(settings, checkpoint=subject.served), torch.device(device))
    found = _last_words(engine, subject.texts)
    engine.close()
    return found


def _last_words(engine: Engine, texts: Sequence[tuple[Ids, int]]) -> list[bool]:
    """Return of each text of LAMBADA whether every token of the last word is the most probable one."""
    if not texts:
        return []
    best = tell_by_engine(engine, [ids for ids, _ in texts]).top_ids[:, 0]
    pairs = zip(texts, np.cumsum([len(ids) - 1 for ids, _ in texts]), strict=True)
    return [bool((best[end - count : end] == np.array(ids[-count:])).all()) for (ids, count), end in pairs]


def _fallen(usual: Sequence[bool], hits: Sequence[bool]) -> str:
    """Return whether an accuracy fell by more than two standard errors of the paired difference, and both."""
    lost = np.array(usual, float) - np.array(hits, float)
    error = lost.std() / len(lost) ** 0.5
    verdict = FAILS if lost.mean() > 2 * error > 0 else HOLDS
    return f"{verdict} {np.mean(usual):.3f} {np.mean(hits):.3f}"


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "divergence_power"))
