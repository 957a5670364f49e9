"""What is publicly known of tritonserver by version, and what this project does about it. Standard library only.

SECURITY.md has the table. A fix is dated by the release that has it first: for NVIDIA's bulletins as they say, for
others by the change in the server's own history, which is named.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NOTHING = ""
"""Stops it."""
GUARD, CLOSED, ABSENT = "the guard", "the closed APIs", "nothing of the kind is served"
_IN_PYTRITON = {"0.7.0": "2.51.0"}
"""nvidia-pytriton's own version, and that of the server in it, which nothing in the package says."""


@dataclass(frozen=True)
class Fault:
    """One thing that is known.

    Attributes:
        names: CVEs; empty where it has none that is known here.
        title: what a client can do.
        fixed_in: first version without it; None: what could be read of it does not say.
        stopped_by: what keeps clients from it; empty: nothing does.
        tests: requests of ``tests/integration/test_guard.py`` that show it against the real server.
        change: of the server's repository, that fixed it.
    """

    names: tuple[str, ...]
    title: str
    fixed_in: tuple[int, int, int] | None
    stopped_by: str
    tests: tuple[str, ...] = ()
    change: str = ""


GRPC_ERRORS = Fault(
    (),
    "memory of gRPC streams with the metadata triton_grpc_error is used after its end",
    (2, 68, 0),
    GUARD,
    ("metadata triton_grpc_error",),
    "#8708",
)
FAULTS = (
    Fault(
        ("CVE-2025-23310", "CVE-2025-23311"),
        "a body in very many chunks overflows the stack (CVSS 9.8)",
        (2, 59, 1),
        GUARD,
        ("a million chunks",),
    ),
    Fault(
        ("CVE-2025-23319", "CVE-2025-23320", "CVE-2025-23334"),
        "the Python backend's own memory is read and written through the shared-memory API (CVSS 8.1)",
        (2, 59, 1),
        CLOSED,
        ("shared memory",),
    ),
    Fault(
        ("CVE-2025-33201",),
        "very large payloads end the server",
        None,
        GUARD,
        ("a length beyond the limit", "too large", "a bomb"),
    ),
    Fault(("CVE-2026-24146",), "very many outputs end the server", None, GUARD, ("300,000 outputs",)),
    Fault(
        ("CVE-2026-24173",),
        "integers in a request overflow and end the server",
        None,
        GUARD,
        ("2^62 elements", "2^62 elements of no bytes", "2^64 elements by two dimensions", "2^62 values in the message"),
    ),
    Fault(
        ("CVE-2026-24206", "CVE-2026-24207"),
        "restrictions of APIs are passed by another path (CVSS 9.8); which one is not public",
        None,
        NOTHING,
    ),
    Fault(("CVE-2026-24208", "CVE-2026-24209"), "path names lead out of a directory (not public)", None, NOTHING),
    Fault(("CVE-2026-24214",), "integers overflow in the DALI backend", None, ABSENT),
    Fault((), "deep JSON overflows the stack", (2, 58, 0), GUARD, ("deep objects", "deep, compressed"), "#8172"),
    Fault((), "shapes in JSON overflow", (2, 68, 0), GUARD, ("2^62 elements", "100 GB of values"), "#8182 to #8676"),
    Fault((), "compressed bodies have no limit", (2, 65, 0), GUARD, ("a bomb", "a bomb by deflate"), "#8570"),
    Fault((), "cancelled gRPC calls race with their end", (2, 59, 0), NOTHING, (), "#7840, #8078, #8220"),
    GRPC_ERRORS,
)  # fmt: skip


def find_version(binary: Path) -> str:
    """Return which version a tritonserver is, without starting it; empty where neither it nor its files say."""
    stated = binary.parents[1] / "TRITON_VERSION"  # of NVIDIA's containers
    with contextlib.suppress(OSError):
        return stated.read_text().strip().removesuffix("dev")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        if "pytriton" in binary.parts:
            return _IN_PYTRITON.get(importlib.metadata.version("nvidia-pytriton"), "")
    return ""


def faults_of(version: str) -> tuple[Fault, ...]:
    """Return what is known of a version; where that is empty, all that is known at all."""
    numbers = tuple(map(int, re.findall(r"\d+", version)[:3]))
    return tuple(fault for fault in FAULTS if fault.fixed_in is None or not numbers or numbers < fault.fixed_in)


def reachable(version: str, is_guarded: bool) -> list[Fault]:
    """Return what of it clients reach."""
    held = {CLOSED, ABSENT, *([GUARD] if is_guarded else [])}
    return [fault for fault in faults_of(version) if fault.stopped_by not in held]


def describe(version: str, is_guarded: bool) -> str:
    """Return in one line what is known of a version, and what of it reaches the server."""
    open_ones = reachable(version, is_guarded)
    known = f"{len(faults_of(version))} publicly known faults (SECURITY.md)"
    if not open_ones:
        return f"{known}, none of which clients reach"
    return f"{known}; clients reach {len(open_ones)}: {_names(open_ones)}"


def _names(faults: Sequence[Fault]) -> str:
    return ", ".join(name for fault in faults for name in (fault.names or (f"server {fault.change}",)))
