"""Checkpoints made to exhaust whoever opens them: each is one clear error, in seconds and little memory."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from support.checkpoints.distributed_checkpoints import ZARR, nemo2
from support.checkpoints.nemo_archive import NEMO, TOKENIZER, gpt_config, torch_bytes, write_gpt
from support.checkpoints.nemo_samples import restore, unpacked
from support.shards.ft_checkpoint_maker import make_ft_checkpoint, seal
from support.tiny_models.huggingface_models import save

from export_scripts.conversion.plan.check import inspect_source
from handover.errors import SlipwayError

ROOT = Path(__file__).resolve().parents[2]
# The interpreter with numpy takes about 40 MB; the rest is what an attack may cost.
MOST_BYTES, INTERPRETER_BYTES, MOST_S = 1000 << 20, 40 << 20, 15
# An attack that a limit stops meets an eighth of it, for an eighth of the memory.
SHARE = 8


# One process has imported what all need, and is forked for each checkpoint. The fork's own peak is in /proc: what wait4
# says of a process of these tests includes what they held when it was forked.
_INSPECT = """
import json, os, resource, runpy, sys
import export_scripts.inspect
from export_scripts.checkpoints.files import archive, pickled
del sys.modules["export_scripts.inspect"]
for line in sys.stdin:
    if not os.fork():
        break
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
else:
    sys.exit()
path, share, printed, said, seconds = json.loads(line)
os.dup2(os.open(printed, os.O_WRONLY | os.O_CREAT), 1)
os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
archive._HEADER_BYTES //= share
pickled._MOST_STEPS //= share
sys.argv = ["inspect", path]
try:
    runpy.run_module("export_scripts.inspect", run_name="__main__", alter_sys=True)
finally:
    with open("/proc/self/status") as status:
        print(next(line for line in status if line.startswith("VmHWM:")).split()[1])
"""


@cache
def forked() -> subprocess.Popen[str]:
    """Return the process that is forked; it ends with these tests, by the end of its input."""
    argv = [sys.executable, "-c", _INSPECT]
    return subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def refusal(path: Path, share: int = 1) -> str:
    """Open a checkpoint in a process that dies if it takes too much, and return its one error.

    Args:
        path: the checkpoint.
        share: divides what the reader allows, and the memory that may be taken beyond the interpreter's.
    """
    with tempfile.TemporaryDirectory() as directory:
        printed, error = Path(directory, "printed"), Path(directory, "error")
        print(json.dumps([str(path), share, str(printed), str(error), MOST_S]), file=forked().stdin, flush=True)
        status, said = int(forked().stdout.readline()), error.read_text()
        assert status == 1, said[-2000:]
        peak = int(printed.read_text().split()[-1]) * 1024
    assert "Traceback" not in said, said[-2000:]
    assert peak < INTERPRETER_BYTES + (MOST_BYTES - INTERPRETER_BYTES) // share
    assert said.startswith("inspect: ")
    assert len(said) < 20_000
    return said


def nemo_tree(root: Path, pickled: bytes) -> Path:
    """A NeMo directory whose weights are that pickle."""
    root.mkdir()
    (root / "model_config.yaml").write_text(yaml.safe_dump(gpt_config()))
    for name, content in TOKENIZER.items():
        (root / name).write_bytes(content)
    with zipfile.ZipFile(root / "model_weights.ckpt", "w") as records:
        records.writestr("archive/data.pkl", pickled)
    return root


def called(function: str, arguments: bytes, many: int = 20_000) -> bytes:
    """A pickle that makes a tuple of arguments once and calls a function with it many times."""
    module, _, name = function.rpartition(".")
    call = f"c{module}\n{name}\n".encode() + b"h\x00R0"
    return b"\x80\x02" + arguments + b"q\x000(" + call * many + b"t."


def text(length: int, unit: bytes = b"a") -> bytes:
    return b"X" + (length * len(unit)).to_bytes(4, "little") + unit * length


ROW = b"]q\x01(" + b"N" * 300_000 + b"e"  # a list of 300,000 elements
PICKLES: dict[str, Callable[[], bytes]] = {
    "a place in the memo far away": lambda: b"\x80\x02}r\xff\xff\xff\x7f.",
    "many empty containers": lambda: b"\x80\x04(" + b"}" * 40_000_000 + b"t.",
    "many empty sets": lambda: b"\x80\x04(" + b"\x8f" * 20_000_000 + b"t.",
    "many marks": lambda: b"\x80\x02" + b"(" * 40_000_000 + b".",
    "one list copied many times": lambda: called("torch.Size", ROW + b"\x85"),
    "one list made a set many times": lambda: called("builtins.set", ROW + b"\x85"),
    "one call's arguments many times": lambda: called("collections.defaultdict", b"(" + b"N" * 300_000 + b"t"),
    "one text encoded many times": lambda: called("_codecs.encode", text(1 << 20) + text(1, b"latin1") + b"\x86"),
    "an encoding of quadratic time": lambda: called(
        "_codecs.encode", text(1 << 20, "\u00e9".encode()) + text(1, b"punycode") + b"\x86", many=1
    ),
    "bytes of another length than there are": lambda: b"\x80\x05\x8e" + (1 << 40).to_bytes(8, "little") + b"x.",
    "an array of bytes of another length": lambda: b"\x80\x05\x96" + (1 << 36).to_bytes(8, "little") + b"x.",
    "deep nesting": lambda: b"\x80\x02" + b"]" * 2_000_000 + b"a" * 1_999_999 + b".",
    "a dictionary in itself": lambda: b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s.",
}


# Of the attacks that a limit stops, the costliest meets all of it, too. Deep nesting stays just below it.
AT_THE_LIMIT = [("deep nesting", 1), pytest.param("many empty containers", 1, marks=pytest.mark.long)]


@pytest.mark.parametrize(
    ("attack", "share"), [*((attack, SHARE) for attack in PICKLES if attack != "deep nesting"), *AT_THE_LIMIT]
)
def test_pickles_that_exhaust_the_reader(attack: str, share: int, tmp_path: Path) -> None:
    said = refusal(nemo_tree(tmp_path / "tree", PICKLES[attack]()), share)
    assert "model_weights.ckpt" in said or "has no keys of a GPT" in said


def _with(tree: Path, name: str, **changes: Any) -> Path:
    """Change keys of a JSON or YAML file."""
    file = tree / name
    kind: Any = json if name.endswith(("json", ".zarray")) else yaml
    content = (json.loads if kind is json else yaml.safe_load)(file.read_text())
    file.write_text((json.dumps if kind is json else yaml.safe_dump)({**content, **changes}))
    return tree


def hugging_face(path: Path, family: str = "gpt2", **changes: Any) -> Path:
    save(family, path)
    return _with(path, "config.json", **changes)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_layers", 10**9),
        ("hidden_size", 4 * 10**9),
        ("num_attention_heads", 10**9),
        ("ffn_hidden_size", 10**18),
        ("max_position_embeddings", 10**12),
        ("tensor_model_parallel_size", 10**9),
        ("pipeline_model_parallel_size", 10**9),
        ("num_query_groups", 10**9),
        ("rotary_percentage", float("inf")),
    ],
)
def test_absurd_values_in_a_nemo_configuration(key: str, value: Any, tmp_path: Path) -> None:
    changes = {"position_embedding_type": "rope"} if key == "rotary_percentage" else {}
    refusal(write_gpt(tmp_path / "gpt.nemo", **{key: value}, **changes))


@pytest.mark.parametrize("key", ["num_layers", "hidden_size", "num_attention_heads", "kv_channels"])
def test_absurd_values_of_a_t5(key: str, tmp_path: Path) -> None:
    tree = unpacked(NEMO / "t5_abs.nemo", tmp_path / "t5")
    sides = yaml.safe_load((tree / "model_config.yaml").read_text())
    changes = {side: {**sides[side], key: 10**9} for side in ("encoder", "decoder")}
    refusal(_with(tree, "model_config.yaml", **changes))


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("gpt2", "n_layer"),
        ("gpt2", "n_embd"),
        ("gpt2", "n_head"),
        ("gpt2", "n_inner"),
        ("gpt2", "vocab_size"),
        ("opt", "num_hidden_layers"),
        ("xglm", "max_position_embeddings"),
        ("xglm", "num_layers"),
        ("gpt_neox", "num_hidden_layers"),
    ],
)
def test_absurd_values_in_config_json(family: str, key: str, tmp_path: Path) -> None:
    refusal(hugging_face(tmp_path, family, **{key: 10**9}))


VALUES: list[Any] = [None, -1, 0, 1.5, 1e300, float("nan"), "9" * 5000, [], [[1]], {}, {"a": [1]}, True, 10**9, 10**18]


# A key is given a seventh of them, the key after it another seventh.
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("source", ["gpt", "t5_abs", "gpt2", "opt", "bloom", "xglm", "gptj", "gpt_neox", "gpt_bigcode"])
def test_values_of_any_kind_are_an_error_of_the_checkpoint(source: str, every: int, tmp_path: Path) -> None:
    """Whatever stands at any key: the model is expressed, or refused as it should be, and nothing else is raised."""
    if source == "gpt":
        tree = unpacked(write_gpt(tmp_path / "gpt.nemo"), tmp_path / "tree")
    elif source == "t5_abs":
        tree = unpacked(NEMO / "t5_abs.nemo", tmp_path / "tree")
    else:
        save(source, tree := tmp_path / "tree")
    file = tree / ("model_config.yaml" if source in ("gpt", "t5_abs") else "config.json")
    is_yaml = file.suffix == ".yaml"
    config = (yaml.safe_load if is_yaml else json.loads)(file.read_text())
    refused = 0
    for place, key in enumerate(config):
        for value in VALUES[place % every :: every]:
            content = {**config, key: value}
            file.write_text(yaml.dump(content, Dumper=yaml.CSafeDumper) if is_yaml else json.dumps(content))
            try:
                inspect_source(tree, 1, "fp32")
            except SlipwayError as error:
                refused += len(str(error)) < 20_000
            except Exception as error:
                raise AssertionError(f"{key}: {value}") from error
    assert refused > 50 // every


@pytest.mark.parametrize("key", ["num_layer", "head_num", "size_per_head", "vocab_size", "num_tasks", "inter_size"])
def test_absurd_values_in_config_ini(key: str, tmp_path: Path) -> None:
    root = make_ft_checkpoint(tmp_path / "1-gpu")
    lines = [line for line in (root / "config.ini").read_text().splitlines() if not line.startswith(f"{key} ")]
    (root / "config.ini").write_text("\n".join([*lines, f"{key} = {10**9}"]))
    seal(root)
    refusal(root)


LAUGHS = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
CONFIGS = {
    "deep brackets": "a: " + "[" * 400_000,
    "deep blocks": "".join(" " * n + "a:\n" for n in range(900)) + "hidden_size: 8",
    "many nodes": "a: [" + "x," * 5_000_000 + "x]",
    "laughs": LAUGHS + "activation: *a11\nnum_layers: *a11\n",
    "merged laughs": "a0: &a0 {x: 1}\n"
    + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 12)),
    "a list in itself": "activation: &a [*a]",
    "a long number": "num_layers: " + "9" * 100_000,
}


@pytest.mark.parametrize("attack", CONFIGS)
def test_yaml_that_exhausts_the_reader(attack: str, tmp_path: Path) -> None:
    tree = nemo_tree(tmp_path / "tree", b"N.")
    (tree / "model_config.yaml").write_text(CONFIGS[attack])
    assert "model_config.yaml" in refusal(tree)


@pytest.mark.parametrize("name", ["config.json", "vocab.json", "model.safetensors.index.json", "tokenizer.json"])
@pytest.mark.parametrize(
    "content", ["[" * 1_000_000, "[" + "[]," * 20_000_000 + "[]]", '{"n_layer": ' + "9" * 5000 + "}"]
)
def test_json_that_exhausts_the_reader(name: str, content: str, tmp_path: Path) -> None:
    tree = hugging_face(tmp_path / "tree")
    (tree / "model.safetensors").rename(tree / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (tree / "model.safetensors.index.json").write_text(json.dumps(index))
    (tree / name).write_text(content)
    assert name in refusal(tree) or name in ("vocab.json", "tokenizer.json")


def header(entries: str) -> bytes:
    return len(entries).to_bytes(8, "little") + entries.encode()


HEADERS: dict[str, Callable[[], bytes]] = {
    "longer than the file": lambda: (1 << 62).to_bytes(8, "little") + b"{}",
    "many entries": lambda: header("{" + ",".join(map('"{}":{{}}'.format, range(8_000_000))) + "}"),
    "deep": lambda: header('{"a":' + "[" * 1_000_000),
    "a shape of many axes": lambda: header(
        '{"a": {"dtype": "F32", "shape": [' + "9223372036854775807," * 500_000 + '1], "data_offsets": [0, 4]}}'
    ),
    "a shape without end": lambda: header(
        '{"a": {"dtype": "F32", "shape": [%s], "data_offsets": [0, 4]}}' % ("9" * 4000)
    ),
    "tensors of no bytes": lambda: header(
        "{" + ",".join(f'"{n}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for n in range(300_000)) + "}"
    ),
}


@pytest.mark.parametrize("attack", HEADERS)
def test_safetensors_headers_that_exhaust_the_reader(attack: str, tmp_path: Path) -> None:
    tree = hugging_face(tmp_path / "tree")
    (tree / "model.safetensors").write_bytes(HEADERS[attack]() + bytes(4))
    said = refusal(tree)
    assert "model.safetensors" in said or "differences" in said


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [10**9, 256, 64]},
        {"shape": [10**12, 10**12, 64], "chunks": [1, 1, 1]},
        {"shape": [4, 256, 64], "chunks": [1, 1, 1], "dtype": "<i8"},
        {"shape": [10**9, 1, 1], "chunks": [1, 1, 1], "dtype": "<i8"},
        {"shape": [10**9] * 40, "chunks": [1] * 40},
        {"shape": [9**4000, 256, 64]},
        {"shape": [-1, 256, 64]},
        {"shape": [10**12, 256, 64], "chunks": [10**12, 256, 64], "dtype": "<i8"},
        {"shape": [10**12, 256, 64], "chunks": [10**12, 0, 64]},
    ],
)
def test_zarr_arrays_of_absurd_shapes(changes: dict[str, Any], tmp_path: Path) -> None:
    tree = unpacked(restore(ZARR, tmp_path), tmp_path / "tree")
    name = "model_weights/model.decoder.layers.mlp.linear_fc1.weight/.zarray"
    assert "linear_fc1.weight" in refusal(_with(tree, name, **changes))


def test_a_sparse_zarr_chunk_of_many_layers(tmp_path: Path) -> None:
    """A file of holes has any size and takes no room."""
    tree = unpacked(restore(ZARR, tmp_path), tmp_path / "tree")
    folder = tree / "model_weights/model.decoder.layers.mlp.linear_fc1.bias"
    _with(folder, ".zarray", shape=[10**9, 256], chunks=[10**9, 256])
    with (folder / "0.0").open("wb") as file:
        file.truncate(4 * 256 * 10**9)
    assert "linear_fc1.bias" in refusal(tree)


def test_torch_dist_metadata_of_absurd_shapes(tmp_path: Path) -> None:
    tree = nemo2(tmp_path)
    file = tree / "weights/.metadata"
    # The numbers of layers, in shapes and sizes of chunks: K\x04 pushes 4, J pushes four bytes.
    file.write_bytes(file.read_bytes().replace(b"K\x04K", b"J\xff\xff\xff\x7fK"))
    refusal(tree)


def tar_of(path: Path, mode: str, members: Callable[[tarfile.TarFile], None]) -> Path:
    with tarfile.open(path, mode, format=tarfile.PAX_FORMAT) as tar:  # type: ignore[call-overload]
        members(tar)
    return path


@pytest.mark.parametrize(("mode", "share", "limit"), [("w", SHARE, "16 MiB"), ("w:gz", SHARE, "16 MiB")])
def test_tars_with_very_many_members(mode: str, share: int, limit: str, tmp_path: Path) -> None:
    header = tarfile.TarInfo("./a").tobuf()
    opened: Any = gzip.open if mode == "w:gz" else open
    with opened(tmp_path / "gpt.nemo", "wb") as file:
        for _ in range(400 // share):
            file.write(header * 1000)
        file.write(bytes(1024))
    assert f"takes more than {limit}" in refusal(tmp_path / "gpt.nemo", share)


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.XGLTYPE])
def test_tars_with_a_header_of_gigabytes(kind: bytes, tmp_path: Path) -> None:
    member = tarfile.TarInfo("./header")
    member.type, member.size = kind, 6 << 30
    with gzip.open(tmp_path / "gpt.nemo", "wb", compresslevel=1) as file:
        file.write(member.tobuf(tarfile.GNU_FORMAT))
        for _ in range(200):
            file.write(bytes(1 << 20))
    refusal(tmp_path / "gpt.nemo")


def test_a_zip_with_a_directory_of_gigabytes(tmp_path: Path) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as records:
        records.writestr("archive/data.pkl", b"}.")
    content = stream.getvalue()
    start = content.index(b"PK\x01\x02")
    entry, end = content[start : content.index(b"PK\x05\x06")], bytearray(content[-22:])
    many = 1_000_000
    end[12:16] = (many * len(entry)).to_bytes(4, "little")
    tree = nemo_tree(tmp_path / "tree", b"N.")
    (tree / "model_weights.ckpt").write_bytes(content[:start] + entry * many + bytes(end))
    assert "takes more than 40 MiB" in refusal(tree)


def test_a_legacy_torch_file_without_end(tmp_path: Path) -> None:
    tree = nemo_tree(tmp_path / "tree", b"N.")
    start = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
    (tree / "model_weights.ckpt").write_bytes(start + b"\x80\x02" + b"]" * (60_000_000 // SHARE))
    refusal(tree, SHARE)


@pytest.mark.parametrize("name", ["mp_rank_999999999_999999999", "mp_rank_00_999999999999999"])
def test_training_ranks_far_away(name: str, tmp_path: Path) -> None:
    for folder in ("mp_rank_00_000", name):
        (tmp_path / "release" / folder).mkdir(parents=True)
        torch.save({"model": {}, "checkpoint_version": 3.0}, tmp_path / "release" / folder / "model_optim_rng.pt")
    assert "lacks the files of the training ranks" in refusal(tmp_path)


def test_a_shard_far_away(tmp_path: Path) -> None:
    for shard in (0, 10**10):
        (tmp_path / f"shard_{shard}").mkdir()
        np.savez(tmp_path / f"shard_{shard}/0.npz", a=np.zeros(2, np.float32))
    assert "lacks" in refusal(tmp_path)


def test_dictionaries_that_hold_one_another(tmp_path: Path) -> None:
    """Flattened, ten in ten in ten, they would be 10^9."""
    content: Any = {"a": 1}
    for _ in range(9):
        content = {str(n): content for n in range(10)}
    folder = tmp_path / "release/mp_rank_00"
    folder.mkdir(parents=True)
    (folder / "model_optim_rng.pt").write_bytes(torch_bytes({"model": content}))
    refusal(tmp_path)
