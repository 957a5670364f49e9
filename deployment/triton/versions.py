"""Which versions of which programs serve: they stand in the endpoint file, and from there in every report."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform

import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from handover.provenance import VERSION

_TIMEOUT_S = 5


def describe_versions(url: str, has_torch: bool) -> str:
    """Name the programs behind a server: ``slipway 0.3.0, python 3.11.2, torch 2.13.0, triton 2.51.0``.

    Args:
        url: ``host:port`` of gRPC; the server itself says which Triton it is.
        has_torch: whether the engine is ours, which computes with torch.
    """
    found = {"slipway": VERSION, "python": platform.python_version()}
    if has_torch:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found["torch"] = importlib.metadata.version("torch")
    if version := triton_version(url):
        found["triton"] = version
    return ", ".join(f"{name} {version}" for name, version in found.items())


def triton_version(url: str) -> str:
    """Ask a server at ``host:port`` of gRPC which Triton it is; empty where it does not say."""
    with contextlib.suppress(InferenceServerException), triton.InferenceServerClient(url) as client:
        return str(client.get_server_metadata(client_timeout=_TIMEOUT_S).version)
    return ""
