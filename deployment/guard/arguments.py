"""Arguments of the guard: ``deployment.serve`` renders them, the guard's process parses them."""

from __future__ import annotations

from dataclasses import dataclass, field

from handover.arguments import ScriptArguments, option
from handover.ranges import BODY_BYTES, PORT, RANGE

MAX_BODY_BYTES = 128 << 20


@dataclass(frozen=True)
class GuardArguments(ScriptArguments):
    """Stand in front of a tritonserver whose own ports are private."""

    http_port: int = field(metadata={RANGE: PORT, "help": "to listen on"})
    grpc_port: int = field(metadata={RANGE: PORT, "help": "to listen on"})
    metrics_port: int = field(metadata={RANGE: PORT, "help": "to listen on"})
    triton_http_port: int = field(metadata={RANGE: PORT, "help": "Triton's"})
    triton_grpc_port: int = field(metadata={RANGE: PORT, "help": "Triton's"})
    triton_metrics_port: int = field(metadata={RANGE: PORT, "help": "Triton's"})
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0: all of them")
    triton_host: str = option("127.0.0.1", "address that Triton listens on")
    max_body_bytes: int = option(
        MAX_BODY_BYTES, "of a request, over HTTP with its compression taken off, or of a message", BODY_BYTES
    )
    takes_grpc_errors: bool = option(False, "whether this Triton is safe with streams that ask for gRPC's own errors")
