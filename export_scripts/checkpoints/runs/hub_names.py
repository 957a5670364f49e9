"""Runs whose tensors have the hub's names: NeMo-RL's ``step_<n>/policy/weights``, NeMo AutoModel's ``model/``.

Files: NeMo-RL, ``nemo_rl/utils/checkpoint.py``: a finished ``tmp_step_<n>`` is renamed to ``step_<n>``;
``policy/weights`` has torch's distributed files, a ``model/`` with them or with safetensors, or Megatron-Bridge's
``iter_0000000``; ``policy/tokenizer`` and ``config.yaml`` lie above. AutoModel, ``components/checkpoint/``: the ranks'
safetensors or distributed files lie in ``epoch_<e>_step_<s>/model``, config.json and tokenizer in its ``.hf_metadata``,
a directory as transformers writes it in its ``consolidated``; ``LATEST`` names the newest step, and ``.incomplete``
marks one that is being written.
"""

from __future__ import annotations

import re
from pathlib import Path

from export_scripts.checkpoints.files.archive import Archive, Extent, open_archive
from export_scripts.checkpoints.files.distributed import OF_CORE
from export_scripts.checkpoints.files.distributed_metadata import METADATA_FILE
from export_scripts.checkpoints.files.parted_safetensors import PATTERN as SHARDS
from export_scripts.checkpoints.runs.steps import Choice, choose
from handover.errors import CheckpointError
from models.directory import CONFIG_FILE, INDEX_SUFFIX, WEIGHTS_FILE

TRAINING_FILE = "config.yaml"
"""The training's configuration, above the weights."""
_STEP = re.compile(r"(?:epoch_\d+_)?step_(\d+)")
_POLICY = "policy/weights"
_PLACES = (f"{_POLICY}/model", _POLICY, "model")  # of the weights in a step
_WITHIN = re.compile(r"(?:(?P<policy>/policy)(?:/weights(?:/model|/iter_\d+)?)?|/model)/?$")
_POINTER, _INCOMPLETE, _HUB_FILES = "LATEST", ".incomplete", ".hf_metadata/"
_CONSOLIDATED, _ADAPTER, _OF_BRIDGE = "consolidated", "adapter_model.safetensors", "run_config.yaml"
_MOST_BYTES = 1 << 12  # of a pointer


def find_run(path: Path) -> Archive | None:
    """Open the model of a run, of one of its steps, or of a folder within one; None: it is none of these.

    Raises:
        CheckpointError: the step that is taken is incomplete.
    """
    if not path.is_dir():
        return None
    path = path.absolute()
    choice, step = _step(path)
    if within := _WITHIN.search(str(path)):
        step = Path(str(path)[: within.start()] or "/")
    place = _place(step)
    if place is None or (within and not path.is_relative_to(place) and not place.is_relative_to(path)):
        if (step / _POLICY).is_dir() and step == path:
            raise CheckpointError(f"{step / _POLICY} holds no weights that were saved to their end", "copy it again")
        return None
    if (step / _INCOMPLETE).exists():
        raise CheckpointError(f"{step} is marked {_INCOMPLETE}: its save was interrupted", "give another step")
    place = path if path.is_relative_to(place) else _whole(place) or place
    return _with_what_lies_above(place, step, choice.remark if choice else "")


def _step(path: Path) -> tuple[Choice | None, Path]:
    """Choose the step of a run; a path that is no run is itself."""
    try:
        names = [entry.name for entry in path.iterdir() if not entry.is_symlink()]
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    steps = {name: int(match[1]) for name in names if (match := _STEP.fullmatch(name))}
    if not any((path / name / each).is_dir() for name in steps for each in _PLACES):
        return None, path
    choice = choose(path, steps, lambda name: _is_complete(path / name), _pointed(path, steps))
    return choice, path / choice.name


def _pointed(path: Path, steps: dict[str, int]) -> tuple[str, str] | None:
    """Read which step AutoModel names: by a link, or by a text where there are no links."""
    link, text = path / _POINTER, path / f"{_POINTER}.txt"
    if link.is_symlink():
        named = link.readlink().name
    elif text.is_file():
        with text.open("rb") as stream:
            named = Path(stream.read(_MOST_BYTES).decode("utf-8", "replace").strip()).name
    else:
        return None
    if named not in steps:
        raise CheckpointError(f"{path}: {_POINTER} names {named}, which is not there", f"there is: {', '.join(steps)}")
    return _POINTER, named


def _is_complete(step: Path) -> bool:
    return _place(step) is not None and not (step / _INCOMPLETE).exists()


def _place(step: Path) -> Path | None:
    """Find the folder of a step's weights; None: none holds any that were saved to their end."""
    for name in _PLACES:
        place, is_policy = step / name, name.startswith(_POLICY)
        marks = (METADATA_FILE, SHARDS, _ADAPTER, *((f"iter_*/{METADATA_FILE}",) if is_policy else ()))
        if (is_policy or not _is_of_megatron(place)) and (
            _whole(place) or any(any(place.glob(mark)) for mark in marks)
        ):
            return place
    return None


def _is_of_megatron(place: Path) -> bool:
    """Whether a folder that is called as AutoModel's is a run of Megatron's, which may have an adapter beside it."""
    return any(any(place.glob(f"{within}{name}")) for within in ("", "iter_*/") for name in (*OF_CORE, _OF_BRIDGE))


def _whole(place: Path) -> Path | None:
    """Find the directory of transformers' that AutoModel put together of a step; None: there is none."""
    files = (WEIGHTS_FILE, f"{WEIGHTS_FILE}{INDEX_SUFFIX}")
    folder = place / _CONSOLIDATED
    return folder if (folder / CONFIG_FILE).is_file() and any((folder / name).is_file() for name in files) else None


def _with_what_lies_above(place: Path, step: Path, remark: str) -> Archive:
    """Add the configuration and the tokenizer to the weights, where their readers look for them."""
    own = open_archive(place)
    extents = {name: own.extent(name) for name in own.sizes if not name.startswith(f"{_CONSOLIDATED}/")}
    tokenizer = "tokenizer/" if any(name.endswith(_OF_BRIDGE) for name in extents) else ""
    hub_files = {name.removeprefix(_HUB_FILES): each for name, each in extents.items() if name.startswith(_HUB_FILES)}
    above = hub_files | {f"{tokenizer}{name}": each for name, each in _files(step / "policy/tokenizer", step).items()}
    return Archive(place, {**above, **_files(step, step, TRAINING_FILE), **extents}, remark=remark)


def _files(folder: Path, step: Path, pattern: str = "*") -> dict[str, Extent]:
    """List files above the weights, which are no links out of the step; CheckpointError: one is."""
    paths = [path for path in folder.glob(pattern) if path.is_file()]
    for path in paths:
        if not (real := path.resolve()).is_relative_to(step.resolve()):
            raise CheckpointError(f"{path} is a link to {real}, outside of {step}", "copy the file there, or remove it")
    return {path.name: Extent(path, 0, path.stat().st_size) for path in paths}
