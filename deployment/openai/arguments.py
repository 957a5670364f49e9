"""Arguments of the OpenAI endpoint: ``deployment.serve`` renders them, the endpoint parses them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from handover.arguments import ScriptArguments
from handover.ranges import BODY_BYTES, DAY_S, IN_FLIGHT, INSTANCES, PORT, RANGE, TOKEN_ID


@dataclass(frozen=True)
class OpenAIArguments(ScriptArguments):
    """Put the OpenAI API in front of a running Triton server."""

    endpoint: str = field(
        metadata={"help": "endpoint.json of a deployment, its directory, or host:port of Triton's gRPC"}
    )
    host: str = field(default="127.0.0.1", metadata={"help": "address to listen on; 0.0.0.0: all of them"})
    port: int = field(default=0, metadata={RANGE: PORT, "help": "0: a free one"})
    models: tuple[str, ...] = field(
        default=(), metadata={"help": "JSON list of Triton's models to offer; empty: all in the repository"}
    )
    model_repository: Path | None = field(
        default=None, metadata={"help": "the repository that Triton serves, where endpoint.json does not say it"}
    )
    sockets: Path | None = field(
        default=None,
        metadata={
            "help": "directory of the drop-in engine's sockets on this host, where endpoint.json does not say it"
        },
    )
    tokenizer: Path | None = field(
        default=None, metadata={"help": "directory of the tokenizer's files, where no repository has them"}
    )
    end_id: int | None = field(
        default=None, metadata={RANGE: TOKEN_ID, "help": "token that ends a text, where no repository says it"}
    )
    chat_template: Path | None = field(
        default=None, metadata={"help": "Jinja template of conversations, in place of the tokenizer's own"}
    )
    api_keys_file: Path | None = field(
        default=None, metadata={"help": "file with a bearer key a line; without it everybody is answered"}
    )
    access_log: Path | None = field(default=None, metadata={"help": "file that gets a JSON line a request"})
    metrics_url: str = field(
        default="", metadata={"help": "URL of Triton's metrics, where endpoint.json does not say it"}
    )
    max_body_bytes: int = field(default=8 << 20, metadata={RANGE: BODY_BYTES, "help": "bytes of a request's body"})
    max_sequences: int = field(
        default=512, metadata={RANGE: IN_FLIGHT, "help": "answers of one request: prompts times n (or best_of)"}
    )
    max_requests: int = field(
        default=1024, metadata={RANGE: IN_FLIGHT, "help": "requests at a time; more are told to come again (429)"}
    )
    processes: int = field(
        default=1,
        metadata={
            RANGE: INSTANCES,
            "help": "processes that share the port; a token costs some 0.03 ms of a processor, 0.2 through gRPC",
        },
    )
    shares_port: bool = field(default=False, metadata={"help": "whether other processes listen on the port too"})
    exit_timeout_s: float = field(
        default=10, metadata={RANGE: DAY_S, "help": "seconds for requests in flight at the end"}
    )
