"""Arguments of the OpenAI endpoint: ``deployment.serve`` renders them, the endpoint parses them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from handover.arguments import ScriptArguments, option
from handover.ranges import BODY_BYTES, DAY_S, IN_FLIGHT, INSTANCES, LOG_BYTES, PORT, SHARE, TOKEN_ID


@dataclass(frozen=True)
class OpenAIArguments(ScriptArguments):
    """Put the OpenAI API in front of a running Triton server."""

    endpoint: str = field(
        metadata={"help": "endpoint.json of a deployment, its directory, or host:port of Triton's gRPC"}
    )
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0: all of them")
    port: int = option(0, "0: a free one", PORT)
    models: tuple[str, ...] = option((), "JSON list of Triton's models to offer; empty: all in the repository")
    model_repository: Path | None = option(
        None, "the repository that Triton serves, where endpoint.json does not say it"
    )
    sockets: Path | None = option(
        None, "directory of the drop-in engine's sockets on this host, where endpoint.json does not say it"
    )
    tokenizer: Path | None = option(None, "directory of the tokenizer's files, where no repository has them")
    end_id: int | None = option(None, "token that ends a text, where no repository says it", TOKEN_ID)
    chat_template: Path | None = option(None, "Jinja template of conversations, in place of the tokenizer's own")
    tool_dialect: str | None = option(None, "how the model writes tool calls; left out: as its chat template does")
    api_keys_file: Path | None = option(None, "file with a bearer key a line; without it everybody is answered")
    adapter_keys_file: Path | None = option(
        None, "file with a bearer key a line of those who load and unload adapters; without it that is off"
    )
    access_log: Path | None = option(None, "file that gets a JSON line a request")
    sample_log: Path | None = option(
        None, "file that gets tokens and log probabilities of some requests, for evaluation=monitor; left out: none"
    )
    sample_share: float = option(0.01, "of the requests that sample_log gets", SHARE)
    sample_bytes: int = option(64 << 20, "of sample_log and the older file beside it, at most", LOG_BYTES)
    metrics_url: str = option("", "URL of Triton's metrics, where endpoint.json does not say it")
    max_body_bytes: int = option(8 << 20, "bytes of a request's body", BODY_BYTES)
    max_sequences: int = option(512, "answers of one request: prompts times n (or best_of)", IN_FLIGHT)
    max_requests: int = option(1024, "requests at a time; more are told to come again (429)", IN_FLIGHT)
    processes: int = option(
        1, "processes that share the port; a token costs some 0.03 ms of a processor, 0.2 through gRPC", INSTANCES
    )
    shares_port: bool = option(False, "whether other processes listen on the port too")
    exit_timeout_s: float = option(10, "seconds for requests in flight at the end", DAY_S)
