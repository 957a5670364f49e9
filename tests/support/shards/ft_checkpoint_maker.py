"""A small FT checkpoint with random weights, its sizes as FasterTransformer's own converter wrote them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from handover.manifest import Manifest, record_files

DATA = Path(__file__).resolve().parents[2] / "data"
LISTINGS = json.loads((DATA / "ft_converter_listings.json").read_text())
ALPHABET = [chr(code) for code in [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)]]
"""The 256 characters that GPT-2's byte-level BPE writes for the 256 bytes."""

MERGES = ["Ġ t", "h e", "Ġt he", "l l", "o r", "Ġ w"]


def make_ft_checkpoint(directory: Path, kind: str = "fp32/1") -> Path:
    """Write shards, config.ini, a tiny GPT-2 tokenizer and the manifest."""
    directory.mkdir(parents=True)
    rng = np.random.default_rng(7)
    for name, size in LISTINGS[kind]["sizes"].items():
        (directory / name).write_bytes(rng.bytes(size))
    config = {**LISTINGS[kind]["config"], "end_id": "0"}
    lines = "".join(f"{key} = {value}\n" for key, value in config.items())
    (directory / "config.ini").write_text(f"[gpt]\n{lines}\n")
    vocabulary = ["<|endoftext|>", *ALPHABET, *(merge.replace(" ", "") for merge in MERGES)]
    (directory / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(vocabulary)}))
    (directory / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{merge}\n" for merge in MERGES))
    seal(directory)
    return directory


def seal(directory: Path) -> None:
    Manifest("ft_checkpoint", record_files(directory), made_by={"version": "test"}).write(directory)
