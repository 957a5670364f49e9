"""Time rows that have LoRA adapters on a GPU beside plain ones, and compare what they give with transformers.

    python3 -m benchmarks.gpu.adapters --csv=adapters.csv
    python3 -m benchmarks.gpu.adapters --size="Llama 160M" --data-type=bf16 --rank=64

Truth first: a small Llama with adapters on all linear layers, in fp32; rows of one request with different adapters and
without, against transformers with each adapter merged. Then a model with made-up weights, of which the same request is
timed in several ways in one run: on an engine that has no room for adapters, and on one that has, with plain rows, with
rows that take turns among the adapters, with half of them plain, and with one adapter for all. step_ms is the time of a
decode step, from answers of two lengths; ratio is the rate of its rows beside the first line's. With --peer-path, vLLM
with room for adapters, and graphs of no more rows, answers the same cases first, with the same adapters; peer_ms is its
step. Exit status 1 where tokens differ.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from backends.fastertransformer.engine.engine import Engine, open_engine
from backends.fastertransformer.engine.settings import Settings
from benchmarks.engine.random_directory import write_directory
from benchmarks.gpu.decode import asks_of, latency_ms
from benchmarks.gpu.models import Table, engine_of, find_size, kernel_times, need_gpu
from benchmarks.peers.models import hugging_face_config
from ft_format.tensors import ARGMAX_NUCLEUS
from handover.arguments import ScriptArguments
from handover.errors import exit_status
from models.decoder import Decoder
from models.described import read_directory
from models.peft import CONFIG_FILE, DIRECTORY, PREFIX, WEIGHTS_FILE, linear_layers

_SMALL: dict[str, Any] = {
    **{"model_type": "llama", "vocab_size": 1024, "hidden_size": 512, "intermediate_size": 1376},
    **{"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64},
    **{"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu"},
    **{"tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0, "torch_dtype": "float32"},
}
_LIMIT = 1e-3  # of differences of log-probabilities, in fp32
_NEVER = 1 << 20
_NO_ROOM = "without room for adapters"
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class AdapterArguments(ScriptArguments):
    """What to measure."""

    size: str = field(default="Llama 3.1 8B", metadata={"help": "of the model"})
    rows: int = field(default=64, metadata={"help": "of a request"})
    adapters: int = field(default=16, metadata={"help": "among which they take turns"})
    rank: int = field(default=16, metadata={"help": "of every adapter, on all linear layers"})
    lengths: tuple[int, int, int] = field(default=(64, 32, 160), metadata={"help": "input, and two outputs, in tokens"})
    data_type: str = field(default="fp16", metadata={"help": "fp16 or bf16"})
    repeats: int = field(default=5, metadata={"help": "measurements of each case; the median counts"})
    truth: bool = field(default=True, metadata={"help": "compare with transformers first"})
    profile: Path | None = field(default=None, metadata={"help": "file that takes the kernels by time"})
    peer_path: Path | None = field(default=None, metadata={"help": "directory with vLLM, for its PYTHONPATH"})
    peer_env: tuple[str, ...] = field(default=(), metadata={"help": "JSON list of NAME=value, for vLLM alone"})
    csv: Path | None = field(default=None, metadata={"help": "file to write"})
    commit: str = field(default="", metadata={"help": "what is measured, for the file"})


@dataclass(frozen=True)
class Row:
    """One case."""

    case: str
    rows: int
    adapters: int
    rank: int
    step_ms: float
    ratio: float
    peer_ms: float | None


def write_adapter(
    directory: Path, decoder: Decoder, rank: int, seed: int, dtype: torch.dtype, has_head: bool = False
) -> Path:
    """Write an adapter of random numbers, of a visible size, for all linear layers, and for the head if asked to."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True)
    generator, tensors = torch.Generator().manual_seed(seed), {}
    layers = linear_layers(decoder)
    if not has_head:
        del layers[decoder.names["head"]]
    for name, layer in layers.items():
        for side, shape in (("A", (rank, layer.inputs)), ("B", (layer.outputs, rank))):
            numbers = torch.randn(shape, generator=generator) * shape[1] ** -0.5 * (1.0 if side == "A" else 0.2)
            tensors[f"{PREFIX}{name}.lora_{side}.weight"] = numbers.to(dtype)
    save_file(tensors, directory / WEIGHTS_FILE)
    targets = sorted({name.rpartition(".")[2] for name in layers})
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "target_modules": targets}
    (directory / CONFIG_FILE).write_text(json.dumps(said))
    return directory


def check_truth() -> float:
    """Compare rows with adapters with transformers; returns the largest difference of log-probabilities.

    Infinity: a token is not transformers' argmax, and not within rounding of it.
    """
    import transformers

    names, worst = ["", "a0", "a1", "a2"], 0.0
    with tempfile.TemporaryDirectory(prefix="slipway-gpu-") as folder:
        directory = Path(folder)
        write_directory(_SMALL, directory)
        decoder = read_directory(directory, _raise).decoder
        for number, rank in enumerate((4, 16, 40)):
            write_adapter(directory / f"adapters/a{number}", decoder, rank, number, torch.float32)
        settings = Settings(directory, 1, 1, "fp32", model_type="Llama")
        draw = np.random.default_rng(0)
        rows = [draw.integers(1, 1000, int(draw.integers(4, 400))).tolist() for _ in range(48)]
        with closing(open_engine(settings)) as engine:
            print(engine.description, flush=True)
            answers = [_ask(engine, rows[:8], [names[row % 4] for row in range(8)])]
            answers += [_ask(engine, rows, [names[row % 4] for row in range(48)])]
        plain = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).cuda().eval()
        for number, name in enumerate(names):
            model = merged(plain, directory, name) if name else plain
            for given, answer in zip((rows[:8], rows), answers, strict=True):
                for row in range(number, len(given), 4):
                    worst = max(worst, _difference(model, given[row], answer, row))
    return worst


def _raise(problem: str, hint: str) -> Exception:
    return ValueError(f"{problem} {hint}")


def _ask(engine: Engine, rows: list[list[int]], names: list[str], count: int = 24) -> Any:
    ids = np.zeros((len(rows), max(map(len, rows))), np.uint32)
    for row, line in enumerate(rows):
        ids[row, : len(line)] = line
    columns = {"input_lengths": [len(line) for line in rows], "request_output_len": count, "end_id": _NEVER}
    tensors = {name: np.broadcast_to(np.array(each, np.uint32), len(rows)).copy() for name, each in columns.items()}
    told = {"is_return_log_probs": np.ones(len(rows), bool), "lora_name": np.array(names, object)}
    told["runtime_top_p"] = np.full(len(rows), ARGMAX_NUCLEUS, np.float32)
    return engine.generate([engine.parse({"input_ids": ids, **tensors, **told})])[0]


def merged(model: Any, directory: Path, name: str) -> Any:
    """Copy transformers' model, with an adapter of a directory that write_adapter wrote merged."""
    from safetensors.torch import load_file

    model = copy.deepcopy(model)
    pairs = load_file(directory / DIRECTORY / name / WEIGHTS_FILE, device=str(model.device))
    for key in (key for key in pairs if ".lora_A." in key):
        weight = model.get_parameter(key.removeprefix(PREFIX).replace(".lora_A", ""))
        weight.data += pairs[key.replace(".lora_A.", ".lora_B.")] @ pairs[key]
    return model


@torch.no_grad()
def _difference(model: Any, line: list[int], answer: Any, row: int) -> float:
    end = int(answer["sequence_length"][row, 0])
    whole = torch.from_numpy(answer["output_ids"][row, 0, :end].astype(np.int64)).cuda()
    scores = model(whole[None]).logits[0, len(line) - 1 : -1].log_softmax(-1)
    own = scores.gather(1, whole[len(line) :, None])[:, 0]
    if bool((scores.max(-1).values - own > _LIMIT).any()):
        return float("inf")
    given = torch.from_numpy(answer["output_log_probs"][row, 0, : len(own)]).cuda()
    return float((own - given).abs().max())


def step_ms(engine: Engine, arguments: AdapterArguments, names: Sequence[str]) -> float:
    """Time a decode step of rows with these adapters; an empty name is none."""
    size, times = find_size(arguments.size), []
    for output in arguments.lengths[1:]:
        tensors = size.tensors(asks_of((len(names), arguments.lengths[0], output), size.vocab))
        if any(names):
            tensors["lora_name"] = np.array(names, object)[:, None]
        run = partial(_generate, engine, tensors)
        times.append(latency_ms(run, arguments.repeats)[1])
    if arguments.profile:
        with arguments.profile.open("a") as file:
            file.write(f"{len(set(names))} adapters\n{kernel_times(run)}")
    return (times[1] - times[0]) / (arguments.lengths[2] - arguments.lengths[1])


def _generate(engine: Engine, tensors: Any) -> None:
    engine.generate([engine.parse(tensors)])


def peer_steps(arguments: AdapterArguments, directory: Path, cases: Sequence[Sequence[str]]) -> list[float]:
    """Let vLLM time the same cases, in a process of its own that has ended when this returns."""
    size = find_size(arguments.size)
    config = hugging_face_config(size, arguments.data_type)
    (directory / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "benchmarks.peers.vllm_adapters", f"--directory={directory}"]
    command += [
        f"--cases={json.dumps(cases)}",
        f"--lengths={json.dumps(arguments.lengths)}",
        f"--rank={arguments.rank}",
    ]
    command += [f"--repeats={arguments.repeats}", f"--vocab={size.vocab}"]
    env = os.environ | dict(pair.split("=", 1) for pair in arguments.peer_env)
    env["PYTHONPATH"] = os.pathsep.join([str(arguments.peer_path), str(_ROOT), env.get("PYTHONPATH", "")])
    subprocess.run(command, env=env, cwd=_ROOT, check=True)
    return [float(each) for each in json.loads((directory / "steps.json").read_text())]


def measure(arguments: AdapterArguments) -> None:
    """Time all cases of one model."""
    size, table = find_size(arguments.size), Table(arguments.csv, arguments.commit)
    count, rows = arguments.adapters, arguments.rows
    turns = [f"a{row % count}" for row in range(rows)]
    cases = {"plain rows": [""] * rows, "all rows": turns, "one adapter": ["a0"] * rows}
    cases["half of the rows"] = [name if row % 2 else "" for row, name in enumerate(turns)]
    with tempfile.TemporaryDirectory(prefix="slipway-gpu-") as folder:
        directory, peer = Path(folder), dict[str, float]()
        size.write(directory)
        decoder = read_directory(directory, _raise).decoder
        for number in range(count):
            write_adapter(directory / f"adapters/a{number}", decoder, arguments.rank, number, torch.float16)
        if arguments.peer_path:
            peer = dict(zip(cases, peer_steps(arguments, directory, list(cases.values())), strict=True))
        with engine_of(size, arguments.data_type) as engine:
            first = step_ms(engine, arguments, [""] * rows)
            table.add(Row(_NO_ROOM, rows, 0, 0, first, 1.0, None))
        room = {"max_adapters": count, "max_adapter_rank": arguments.rank}
        with engine_of(size, arguments.data_type, **room) as engine:
            print(engine.description, flush=True)
            for number in range(count):
                engine.load_adapter(f"a{number}", directory / f"adapters/a{number}")
            for case, names in cases.items():
                took = step_ms(engine, arguments, names)
                used = len({*names} - {""})
                table.add(Row(case, rows, used, arguments.rank, took, first / took, peer.get(case)))


def main(argv: Sequence[str]) -> None:
    """Check and measure what the command line asks for."""
    arguments = AdapterArguments.from_argv(argv, __doc__)
    need_gpu()
    worst = 0.0
    if arguments.truth:
        worst = check_truth()
        print(f"largest difference of log-probabilities to transformers: {worst:.2g} (limit {_LIMIT:g})", flush=True)
    measure(arguments)
    if worst > _LIMIT:
        sys.exit(1)


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "adapters"))
