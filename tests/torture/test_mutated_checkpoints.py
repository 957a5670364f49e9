"""Checkpoints of every format with one thing wrong: in a header, a configuration, a tensor, or anywhere in the bytes.

What may come of it: a conversion that is right, or one worded error. A conversion with other weights is right only
where the format has no checksum, and then it is said that nothing proves them. Never a traceback, a hang, or memory
without bounds. Each source's trials run in a process of their own, forked when the source has been made.
"""

from __future__ import annotations

import configparser
import contextlib
import ctypes
import io
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from support.checkpoints import damaged_sources as damaged
from support.checkpoints.equation_sources import huggingface_t5_files, nemo_rotary
from support.checkpoints.nemo_archive import NEMO, write_gpt
from support.checkpoints.nemo_samples import unpacked

from export_scripts import inspect
from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints.digests import UNPROVED
from export_scripts.convert import convert
from handover.errors import SlipwayError
from handover.manifest import Manifest

if TYPE_CHECKING:
    from support.torture.campaign import Campaign, Tally

MOST_S, MOST_BYTES = 20, 1 << 30
M_ARENA_MAX = -8  # of mallopt, from malloc.h
LONGEST = 20_000
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 7, 64, 10**9, 2**31, 2**53, 10**18, 10**400, -(10**400)),
    *(0.5, -0.0, 1e-30, 1e300, float("nan"), float("inf"), float("-inf")),
    *("", "a", "0", "1e9", "../../etc/passwd", "\x1b[2J", "x" * 5000, "${oc.env:HOME}"),
    *([], [[]], [1], ["a"], [None], {}, {"a": {}}, {"id": 1}),
]


@dataclass(frozen=True)
class Base:
    """A source to mutate.

    Attributes:
        make: writes it.
        weights: pattern of the files that hold weights; empty: one file is all there is.
        is_proved: a checksum covers every weight.
        is_sealed: a manifest covers every file.
    """

    make: Callable[[Path], Path]
    weights: str
    is_proved: bool
    is_sealed: bool = False


def nemo_tree(root: Path) -> Path:
    return unpacked(write_gpt(root.with_suffix(".tar")), root)


def rotary_tree(root: Path) -> Path:
    return unpacked(nemo_rotary(root.with_suffix(".tar")), root)


def ft_alone(root: Path) -> Path:
    damaged.ft_checkpoint(root)
    (root / "manifest.json").unlink()
    return root


BASES: dict[str, Base] = {
    **{
        name: Base(make, weights, name not in damaged.UNPROTECTED, name == "FT checkpoint")
        for name, (make, weights) in damaged.SOURCES.items()
    },
    "NeMo, tar": Base(write_gpt, "", is_proved=True),
    "NeMo, directory": Base(nemo_tree, "*.ckpt", is_proved=True),
    "NeMo, rotary": Base(rotary_tree, "*.ckpt", is_proved=True),
    "NeMo, its own tar": Base(lambda root: Path(shutil.copy(NEMO / "gpt_spm.nemo", root)), "", is_proved=True),
    "Hugging Face T5": Base(huggingface_t5_files, "*.safetensors", is_proved=False),
    "FT checkpoint, no manifest": Base(ft_alone, "*.bin", is_proved=False),
}
Files = dict[Path, bytes]
Mutation = Callable[[random.Random, Files], tuple[str, Files]]
"""Given a source's files, says what it did and gives the changed ones."""


def leaves(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a nested value, containers too."""
    if place:
        yield place
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from leaves(value[key], (*place, key))


def within(value: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        value = value[key]
    return value


def change(rng: random.Random, content: Any) -> tuple[str, Any]:
    """Replace, drop or swap something, or put a key beside it."""
    places = list(leaves(content))
    if not places:
        return "all of it", rng.choice(VALUES)
    place = rng.choice(places)
    parent, key, kind = within(content, place[:-1]), place[-1], rng.randrange(10)
    if kind == 0:
        del parent[key]
    elif kind == 1 and isinstance(parent, dict):
        parent["another"] = rng.choice(VALUES)
    elif kind == 2:
        other = rng.choice(places)
        there = within(content, other[:-1])
        if place[: len(other)] != other and other[: len(place)] != place:
            parent[key], there[other[-1]] = there[other[-1]], parent[key]
        kind = 2
    else:
        parent[key] = rng.choice(VALUES)
        return f"{place} = {str(parent[key])[:40]}", content
    return f"{('dropped', 'added beside', 'swapped')[kind] if kind < 3 else 'changed'} {place}", content


def is_json(path: Path) -> bool:
    return path.name.endswith((".json", ".zarray"))


def described(rng: random.Random, files: Files) -> tuple[str, Files]:
    """Change what a description says: JSON, YAML, INI, the header of a safetensors file."""
    kinds = (".json", ".zarray", ".yaml", ".ini", ".safetensors")
    path = rng.choice([path for path in files if path.name.endswith(kinds)])
    content = files[path]
    if path.suffix == ".safetensors":
        size = int.from_bytes(content[:8], "little")
        said, header = change(rng, json.loads(content[8 : 8 + size]))
        text = twice(rng, json.dumps(header)).encode()
        return f"{path.name}: {said}", {path: len(text).to_bytes(8, "little") + text + content[8 + size :]}
    if path.suffix == ".ini":
        parser = configparser.ConfigParser(interpolation=None)
        parser.read_string(content.decode())
        section = rng.choice(parser.sections())
        key, value = rng.choice(list(parser[section])), str(rng.choice(VALUES)).replace("\n", " ").replace("%", "")
        parser.set(section, key, value)
        stream = io.StringIO()
        parser.write(stream)
        return f"{path.name}: {key} = {value[:40]}", {path: stream.getvalue().encode()}
    if is_json(path):
        said, value = change(rng, json.loads(content))
        return f"{path.name}: {said}", {path: twice(rng, json.dumps(value)).encode()}
    said, value = change(rng, yaml.safe_load(content))
    return f"{path.name}: {said}", {path: yaml.safe_dump(value).encode()}


def twice(rng: random.Random, text: str) -> str:
    """Now and then, give a JSON object's first key a second time."""
    if rng.random() > 0.05 or not text.startswith('{"'):
        return text
    key = text[1 : text.index('"', 2) + 1]
    return f"{{{key}: {json.dumps(rng.choice(VALUES))}, {text[1:]}"


def stored(rng: random.Random, files: Files) -> tuple[str, Files]:
    """Save a torch file again with a tensor left out, of another shape or type, under another key, or no tensor."""
    path = rng.choice([path for path in files if path.suffix in (".ckpt", ".pt") or path.name.endswith("model.bin")])
    content = torch.load(io.BytesIO(files[path]), weights_only=False)
    tensors = [place for place in leaves(content) if isinstance(within(content, place), torch.Tensor)]
    if not tensors:
        return "nothing", {}
    place = rng.choice(tensors)
    parent, key = within(content, place[:-1]), place[-1]
    tensor = parent.pop(key)
    kind = rng.randrange(9)
    others = [None, 3, "a", [tensor], {"a": tensor}, torch.tensor(1.0), tensor.reshape(-1), tensor[..., None]]
    others += [tensor.to(torch.int64), tensor.double(), tensor[:-1], tensor[..., :-1], tensor[:0], tensor.T]
    if kind:
        parent[key] = rng.choice(others)
    if kind == 1:
        parent[str(key).replace(".0.", ".1.", 1) + "x"] = tensor
    stream = io.BytesIO()
    torch.save(content, stream, _use_new_zipfile_serialization=files[path][:2] == b"PK")
    return f"{path.name}: {place} {'changed' if kind else 'left out'}", {path: stream.getvalue()}


def bytes_of(rng: random.Random, files: Files) -> tuple[str, Files]:
    """Flip, cut, lengthen, blank, repeat or exchange bytes anywhere."""
    path = rng.choice(list(files))
    content = bytearray(files[path])
    if not content:
        return "nothing", {}
    at, kind = rng.randrange(len(content)), rng.randrange(7)
    run = slice(at, at + rng.choice([1, 4, 16, 512]))
    if kind == 0:
        content[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del content[at:]
    elif kind == 2:
        content += rng.randbytes(rng.choice([1, 512]))
    elif kind == 3:
        content[run] = bytes(len(content[run]))
    elif kind == 4:
        del content[run]
    elif kind == 5:
        content[run] = rng.randbytes(len(content[run]))
    else:
        content[at:at] = content[run]
    return f"{path.name}: bytes, kind {kind} at {at}", {path: bytes(content)}


def result(root: Path) -> dict[str, bytes]:
    """Everything that a conversion wrote but its manifest, which names paths."""
    return {path.name: path.read_bytes() for path in root.iterdir() if path.name != "manifest.json"}


def weights_of(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: content for name, content in files.items() if name.endswith(".bin")}


def run(path: Path, output: Path) -> tuple[dict[str, bytes], str]:
    """Convert in this process; returns what was written and said."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        convert(ConvertArguments(path, output, 1, "fp32", allow_nonfinite=True))
        inspect.main([str(output)])  # what it wrote is whole
    return result(output), said.getvalue()


def try_one(base: Base, path: Path, output: Path, good: dict[str, bytes], is_about_weights: bool) -> str | None:
    """Convert what was mutated; returns what is wrong with what came of it."""
    signal.alarm(MOST_S)
    try:
        found, said = run(path, output)
    except SlipwayError as error:
        is_finished = (output / "manifest.json").exists()
        return "refused, and looks finished" if is_finished else None if len(str(error)) < LONGEST else "a long error"
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {str(error)[:100]} at {Path(where.filename).name}:{where.lineno}"
    finally:
        signal.alarm(0)
    if found == good or (not is_about_weights and not base.is_sealed):
        return None
    if base.is_proved:
        return "accepted with other weights, of a format that has checksums"
    is_said = UNPROVED in said and "checkpoint_digest" in Manifest.read(output).made_from
    return None if is_said else "accepted with other weights, and nothing said so"


def _hang(*_: object) -> None:
    raise TimeoutError(f"it takes longer than {MOST_S} s")


def campaign_of(name: str, path: Path, folder: Path, count: int, seed: int) -> list[tuple[str, str | None]]:
    """Mutate one source that many times."""
    base, rng = BASES[name], random.Random(f"{name} {seed}")
    good, _ = run(path, folder / "good")
    places = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    files = {place: place.read_bytes() for place in places}
    weights = {place: c for place, c in files.items() if path.is_file() or place.match(f"{path}/{base.weights}")}
    trials: list[tuple[str, str | None]] = []
    for number in range(count):
        kinds: list[tuple[Mutation, Files]] = [(bytes_of, files), (bytes_of, weights)]
        if path.is_dir():
            kinds += [(described, files)] * 3
            is_torch = any(content.startswith((b"PK", b"\x80\x02")) for content in weights.values())
            kinds += [(stored, files)] if is_torch and ".metadata" not in {p.name for p in files} else []
        mutate, chosen = rng.choice(kinds)
        try:
            what, changed = mutate(rng, chosen)
        except IndexError:  # nothing of that kind
            continue
        for place, content in changed.items():
            place.write_bytes(content)
        # What a tar's or a directory's small files say may be changed into something else that is as right.
        is_about = mutate is stored or bool(changed.keys() & weights.keys()) and path.is_dir()
        judged = base
        if mutate is stored:  # saved again it has new checksums: only what is left out must be noticed whatever it is
            is_about, judged = what.endswith("left out"), replace(base, is_proved=True)
        output = folder / f"out{number}"
        trials.append((f"{name}: {what}", try_one(judged, path, output, good, is_about)))
        shutil.rmtree(output, ignore_errors=True)
        for place in changed:
            place.write_bytes(files[place])
    return trials


def _in_a_process(name: str, path: Path, folder: Path, count: int, seed: int, answers: Any) -> None:
    signal.signal(signal.SIGALRM, _hang)
    # What is limited is address space, of which malloc sets 64 MiB aside for each thread: 16 threads would fill it.
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + MOST_BYTES,) * 2)
    answers.send(campaign_of(name, path, folder, count, seed))


def test_mutated_checkpoints(campaign: Campaign, tally: Tally, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for name, base in BASES.items():
        folder = tmp_path / name.replace(" ", "_")
        folder.mkdir()
        path = base.make(folder / "checkpoint")
        receiver, sender = context.Pipe(duplex=False)
        count, seed = campaign.trials(5, 390), int(os.environ.get("SLIPWAY_SEED", "1"))
        process = context.Process(target=_in_a_process, args=(name, path, folder, count, seed, sender))
        process.start()
        sender.close()
        try:
            for what, wrong in receiver.recv():
                tally.record(wrong and f"{what}: {wrong}")
        except EOFError:
            tally.record(f"{name}: the process ended without an answer")
        process.join()
        shutil.rmtree(folder)
    tally.check()
