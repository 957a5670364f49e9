"""Digests against a straightforward computation of what they are said to be; manifests of either kind."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zlib
from pathlib import Path
from random import Random

import pytest

from handover import digests
from handover.digests import CRC32_BLOCKS, BlockSums, SummedRange, file_digest, joined_digest
from handover.errors import ArtefactError
from handover.manifest import FileRecord, Manifest

MIB = 1 << 20
PROJECT = Path(__file__).resolve().parents[2]


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


@pytest.mark.parametrize("combines", [True, False])
@pytest.mark.parametrize("size", [5, MIB, 5 * MIB + 77])
def test_ranges_with_known_sums_join_to_the_digest_of_the_file(
    size: int, combines: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not combines:
        monkeypatch.setattr(digests, "crc32_combine", None)
    content, path = os.urandom(size), tmp_path / "weights"
    path.write_bytes(content)
    random = Random(size)
    for _ in range(20):
        cuts = sorted(random.sample(range(size + 1), k=4))
        ranges = []
        for begin, end in ((cuts[0], cuts[1]), (cuts[1], cuts[2]), (cuts[3], size)):
            sums = BlockSums(begin)
            sums.update(content[begin:end])
            ranges.append(SummedRange(begin, end - begin, sums.sums()))
        assert joined_digest(path, ranges) == file_digest(path, CRC32_BLOCKS)
    beyond = SummedRange(size, 9, bytes(4))  # the file has become shorter
    assert joined_digest(path, [beyond]) == file_digest(path, CRC32_BLOCKS)
    wrong = SummedRange(0, size, bytes(4 * -(-size // MIB)))
    assert joined_digest(path, [wrong]) != file_digest(path, CRC32_BLOCKS), "what is known is not read"


def test_blocks_that_ranges_share_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, path = os.urandom(3 * MIB + 9), tmp_path / "weights"
    path.write_bytes(content)
    expected, ranges, begin = file_digest(path, CRC32_BLOCKS), list[SummedRange](), 0
    for end in (7, MIB - 1, MIB + 5, 2 * MIB, len(content)):
        sums = BlockSums(begin)
        sums.update(content[begin:end])
        ranges.append(SummedRange(begin, end - begin, sums.sums()))
        begin = end
    monkeypatch.setattr(digests, "_block_sum", None)
    assert joined_digest(path, ranges) == expected


def test_a_container_without_isal_finds_the_same_digest(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(MIB + 7))
    code = (
        "import sys; sys.modules['isal'] = None; from pathlib import Path; from handover.digests import file_digest\n"
        "print(file_digest(Path(sys.argv[1]), 'crc32-1m'))"
    )
    argv = [sys.executable, "-c", code, str(path)]
    said = subprocess.run(argv, cwd=PROJECT, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == file_digest(path, CRC32_BLOCKS)


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


@pytest.mark.parametrize(
    "content",
    [
        *("null", "[]", "1", '"x"', "{}", "", "\0\0\0", "[" * 100_000, '{"digest": "", "files": null}'),
        *('{"digest": "", "kind": "x", "files": [null]}', '{"digest": "", "kind": "x", "files": [], "made_from": []}'),
        '{"digest": "", "kind": "x", "files": [{"path": "../x", "size_bytes": 1, "digest": "s", "shape": null}]}',
        '{"digest": "", "kind": "x", "files": [{"path": 1, "size_bytes": 1, "digest": "sha256:1", "shape": null}]}',
        '{"digest": "", "kind": "x", "files": [{"path": "x", "size_bytes": "1", "digest": "s", "shape": null}]}',
    ],
)
def test_what_is_no_manifest_is_damaged(content: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ArtefactError, match="is damaged"):
        Manifest.read(tmp_path)
