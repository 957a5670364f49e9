"""Send the request of a file in FasterTransformer's request-file format and print the tensors of the answer.

python -m evaluation.request sample_request.json --endpoint results/gpt3_demo/export_.../deployment

The format is that of FasterTransformer backend's ``tools/issue_request.py`` and ``tools/requests/*.json``: ``config``
with protocol (http, the default, or grpc), url, model_name, verbose and stream_api, and ``request``, a list of tensors
with name, data and dtype.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tritonclient import grpc as triton
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from evaluation.client.errors import RequestError, UnreachableError
from evaluation.client.served_identity import find_endpoint
from evaluation.client.streaming import stream
from handover.errors import ConfigError, exit_status, nearest
from handover.regular_file import read_text

_DEFAULTS: dict[str, Any] = {
    "protocol": "http", "url": None, "model_name": "fastertransformer", "verbose": False, "stream_api": False,
}  # fmt: skip
Tensors = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class RequestFile:
    """The content of a request file.

    Attributes:
        config: values of the keys of ``_DEFAULTS``.
        tensors: inputs by name.
    """

    config: Mapping[str, Any]
    tensors: Tensors


def main(argv: Sequence[str]) -> None:
    """Send the file's request and print each answer's tensors."""
    arguments = _parse(argv)
    content = json.loads(arguments.params) if arguments.params else {}
    request = read_request(arguments.request_file, content)
    url = arguments.url or request.config["url"] or _find_url(request.config, arguments.endpoint)
    start = time.monotonic()
    for answer in ask(request, url, arguments.timeout_s):
        if request.config["stream_api"]:
            sys.stdout.write(f"[After {time.monotonic() - start:.2f}s] Partial result:\n")
        sys.stdout.write("".join(f"{name}:\n{values}\n\n" for name, values in answer.items()))
        sys.stdout.flush()


def read_request(file: Path | None, overrides: Mapping[str, Any]) -> RequestFile:
    """Read a request file.

    Args:
        file: path of the JSON file; None if the overrides are the whole request.
        overrides: content of the same form; a key of ``config`` replaces the file's, ``request`` the whole list.

    Raises:
        ConfigError: the file is missing, no JSON, or has an unknown key or value.
    """
    source = str(file) if file else "--params"
    try:
        content = json.loads(read_text(file)) if file else {}
        config = {**_DEFAULTS, **content.get("config", {}), **overrides.get("config", {})}
        entries = overrides.get("request", content.get("request", []))
        tensors = {entry["name"]: np.array(entry["data"], dtype=entry["dtype"]) for entry in entries}
    except FileNotFoundError:
        raise ConfigError(f"there is no request file {source}") from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{source} is no request file: {error}", "see docs/serving.md") from error
    except KeyError as error:
        raise ConfigError(f"{source}: a tensor has no {error}", "each has name, data and dtype") from error
    if not tensors:
        raise ConfigError(f"{source} has no tensors", 'list them as "request"')
    for key in config.keys() - _DEFAULTS.keys():
        raise ConfigError(f"{source}: unknown key '{key}' in config", nearest(key, _DEFAULTS))
    if config["protocol"] not in ("http", "grpc"):
        raise ConfigError(f"{source}: protocol is '{config['protocol']}'", "it is http or grpc")
    return RequestFile(config, tensors)


def ask(request: RequestFile, url: str, timeout_s: float) -> Iterator[Tensors]:
    """Send a request and yield the tensors of its answer or, with stream_api, of each answer as it arrives.

    Args:
        request: the request.
        url: ``host:port`` of the protocol; a stream always uses gRPC.
        timeout_s: limit until the last answer, in seconds.

    Raises:
        UnreachableError: no server answers.
        RequestError: the request was refused, failed or exceeded the time limit.
    """
    config, model = request.config, str(request.config["model_name"])
    try:
        if _is_http(config):
            yield _ask_http(request, url, timeout_s)
            return
        with triton.InferenceServerClient(url, verbose=config["verbose"]) as client:
            inputs = _inputs(triton, request.tensors)
            answers = (
                stream(client, model, inputs, timeout_s)
                if config["stream_api"]
                else [client.infer(model, inputs, client_timeout=timeout_s)]
            )
            for answer in answers:
                yield {output.name: answer.as_numpy(output.name) for output in answer.get_response().outputs}
    except InferenceServerException as error:
        if "UNAVAILABLE" in str(error.status()):
            raise UnreachableError(f"no server answers at {url}: {error.message()}") from error
        raise RequestError(f"model '{model}' at {url}: {error.message()}") from error
    except OSError as error:
        raise UnreachableError(f"no server answers at {url}: {error}") from error


def _ask_http(request: RequestFile, url: str, timeout_s: float) -> Tensors:
    from tritonclient import http  # imports gevent, which is slow

    verbose = request.config["verbose"]
    with http.InferenceServerClient(url, verbose=verbose, network_timeout=timeout_s) as client:
        answer = client.infer(request.config["model_name"], _inputs(http, request.tensors))
        return {output["name"]: answer.as_numpy(output["name"]) for output in answer.get_response()["outputs"]}


def _inputs(module: Any, tensors: Tensors) -> list[Any]:
    inputs = []
    for name, values in tensors.items():
        tensor = module.InferInput(name, list(values.shape), np_to_triton_dtype(values.dtype))
        tensor.set_data_from_numpy(values)
        inputs.append(tensor)
    return inputs


def _is_http(config: Mapping[str, Any]) -> bool:
    return config["protocol"] == "http" and not config["stream_api"]


def _find_url(config: Mapping[str, Any], source: str | None) -> str:
    endpoint = find_endpoint(source)
    if not _is_http(config):
        return endpoint.grpc_url
    # An address alone is gRPC's; HTTP then listens on Triton's usual port.
    return f"{endpoint.host}:{endpoint.http_port or 8000}"


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m evaluation.request", description="Send a request file and print the tensors of the answer."
    )
    parser.add_argument("request_file", nargs="?", type=Path, help="JSON in FasterTransformer's request-file format")
    parser.add_argument("--params", help="JSON of the same form that replaces what the file says")
    parser.add_argument("--endpoint", help="endpoint.json or its directory; by default the newest below ./results")
    parser.add_argument("--url", help="host:port of the protocol, in place of the file's and the endpoint's")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="limit of the request, seconds")
    arguments = parser.parse_args(list(argv))
    if arguments.request_file is None and not arguments.params:
        parser.error("give a request file or --params")
    return arguments


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "request"))
