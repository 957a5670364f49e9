"""Digests against a straightforward computation of what they are said to be; manifests of either kind."""

from __future__ import annotations

import hashlib
import os
import zlib
from pathlib import Path

import pytest

from handover.digests import CRC32_BLOCKS, BlockSums, file_digest
from handover.manifest import FileRecord, Manifest

MIB = 1 << 20


@pytest.mark.parametrize("size", [0, 1, MIB - 1, MIB, MIB + 1, 3 * MIB + 5])
def test_sums_of_blocks_are_the_digest_of_the_list_of_checksums(size: int, tmp_path: Path) -> None:
    content = os.urandom(size)
    sums = b"".join(zlib.crc32(content[at : at + MIB]).to_bytes(4, "big") for at in range(0, size, MIB))
    expected = hashlib.sha256(sums).hexdigest()
    for step in (1000, 300_000, 2 * MIB):
        digest = BlockSums()
        for at in range(0, size, step):
            digest.update(content[at : at + step])
        assert digest.hexdigest() == expected
    path = tmp_path / "weights"
    path.write_bytes(content)
    assert file_digest(path, CRC32_BLOCKS) == f"crc32-1m:{expected}"
    assert file_digest(path) == f"sha256:{hashlib.sha256(content).hexdigest()}"


@pytest.mark.parametrize("like", ["sha256:", "crc32-1m:"])
def test_a_manifest_tells_one_flipped_bit_and_two_blocks_that_changed_places(like: str, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    content = os.urandom(2 * MIB)
    path.write_bytes(content)
    manifest = Manifest("ft_checkpoint", (FileRecord("weights", len(content), file_digest(path, like)),))
    assert manifest.problems(tmp_path) == []
    for damaged in (content[:-1] + bytes([content[-1] ^ 1]), content[MIB:] + content[:MIB]):
        path.write_bytes(damaged)
        assert len(manifest.problems(tmp_path)) == 1


def test_a_digest_of_an_unknown_kind_fits_nothing(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"w")
    manifest = Manifest("ft_checkpoint", (FileRecord("weights", 1, "md5:abc"),))
    assert manifest.problems(tmp_path) == ["weights  content differs from its digest md5:abc"]
