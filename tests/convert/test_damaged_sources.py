"""Every format of checkpoint, cut anywhere and with bits flipped anywhere in its weights: what must never come of it.

A cut never becomes a finished checkpoint that differs from the good one. Nor does a flipped bit where the format has a
checksum; where it has none (``UNPROTECTED``), it changes the value that it is in and nothing else.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints.damaged_sources import SOURCES, UNPROTECTED

from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert
from handover.errors import SlipwayError
from handover.manifest import FILE_NAME


def shards(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.glob("*.bin")}


@pytest.fixture(scope="module", params=SOURCES)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Name, path, files of weights and the good shards of a checkpoint."""
    make, pattern = SOURCES[request.param]
    folder = tmp_path_factory.mktemp("source")
    path = make(folder / "checkpoint")
    convert(ConvertArguments(path, folder / "good", 1, "fp32"))
    files = sorted(file for file in path.glob(pattern) if file.is_file()) if pattern else [path]
    return request.param, path, files, shards(folder / "good")


def convert_damaged(path: Path, output: Path) -> dict[str, bytes] | None:
    """Convert; None: it was refused, and nothing looks finished."""
    try:
        convert(ConvertArguments(path, output, 1, "fp32", allow_nonfinite=True))
    except SlipwayError:
        assert not (output / FILE_NAME).exists()
        return None
    return shards(output)


def test_a_cut_file_is_refused(source: Any, tmp_path: Path) -> None:
    _, path, files, good = source
    rng, refused = random.Random(1), 0
    for number in range(8):
        file = rng.choice(files)
        content = file.read_bytes()
        file.write_bytes(content[: rng.randrange(len(content))] if content else b"")
        found = convert_damaged(path, tmp_path / str(number))
        file.write_bytes(content)
        assert found in (None, good)
        refused += found is None
    assert refused > 5


def test_flipped_bits_are_refused_or_stay_where_they_are(source: Any, tmp_path: Path) -> None:
    name, path, files, good = source
    rng, refused = random.Random(2), 0
    for number in range(6):
        file = rng.choices(files, [each.stat().st_size for each in files])[0]
        content = file.read_bytes()
        damaged = bytearray(content)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        file.write_bytes(damaged)
        found = convert_damaged(path, tmp_path / str(number))
        file.write_bytes(content)
        refused += found is None
        if found is not None and name in UNPROTECTED:
            assert found.keys() == good.keys()
            assert sum(np.sum(as_numbers(found[key]) != as_numbers(good[key])) for key in good) <= 1
        elif found is not None:
            assert found == good
    assert refused > 3 or name in UNPROTECTED


def as_numbers(content: bytes) -> np.ndarray:
    return np.frombuffer(content, np.uint32)
