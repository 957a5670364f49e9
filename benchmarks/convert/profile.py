"""Say where a program's processor time goes, sorted by what it is spent on: ``perf`` takes the samples."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

# Tried in this order on the functions of a sample, the innermost first; those of the kernel know who called it.
_WORK = (
    ("the kernel, writing", r"ksys_pwrite|x64_sys_pwrite|ksys_write|generic_perform_write"),
    ("the kernel, sending to the disk", r"writepages|sync_file_range|sys_fsync|sync_filesystem"),
    ("the kernel, reading", r"sys_preadv|ksys_pread|ksys_read|filemap_read"),
    ("the kernel, names of files", r"sys_openat|sys_rename|sys_unlink|sys_newfstatat|sys_close"),
    ("the kernel, pages of memory", r"page_fault|sys_munmap|sys_mmap|sys_exit"),
    ("the kernel, all else", r"\[kernel"),
    ("checksums", r"isal|crc32"),
    ("NaN and infinity", r"maximum"),
    ("rearranging and casting", r"_multiarray_umath"),
    ("Python", r"."),
)
_FREQUENCY = 499


def profile(argv: Sequence[str], variables: Mapping[str, str], folder: Path) -> Counter[str]:
    """Run a command and count samples of its processor time, and of its children's, by kind of work.

    Args:
        argv: the command.
        variables: its whole environment.
        folder: for the samples.

    Raises:
        CalledProcessError: the command failed, or samples cannot be taken here.
    """
    samples = folder / "perf.data"
    recording = ["perf", "record", "-q", "-e", "cpu-clock", "-F", str(_FREQUENCY), "-g", "-o", str(samples), "--"]
    subprocess.run([*recording, *argv], env=variables, check=True, capture_output=True)
    script = ["perf", "script", "-i", str(samples), "-F", "ip,sym,dso"]
    text = subprocess.run(script, check=True, capture_output=True, text=True, errors="replace").stdout
    samples.unlink()
    return Counter(_kind_of(stack) for stack in _stacks(text))


def lines(counts: Counter[str]) -> Iterator[str]:
    """Render the shares, the largest first."""
    total = sum(counts.values())
    for name, count in counts.most_common():
        yield f"  {100 * count / total:5.1f}%  {count / _FREQUENCY:6.2f} s  {name}"


def _stacks(text: str) -> Iterator[str]:
    return (stack for stack in text.split("\n\n") if stack.strip())


def _kind_of(stack: str) -> str:
    """Name the work of a sample: in the kernel by any function of the stack, elsewhere by the innermost."""
    innermost = stack.strip().split("\n", 1)[0]
    looked_at = stack if "[kernel" in innermost else innermost
    return next(name for name, pattern in _WORK if re.search(pattern, looked_at))
