"""Which deployment is asked, and whether it still serves the model that it served when a measurement began."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from evaluation.client.client import Client
from evaluation.client.openai_client import ModelCard, OpenAIClient
from handover.endpoint import FILE_NAME, VERSIONS, WEIGHTS_DIGEST, Endpoint
from handover.errors import ArtefactError, ServerError
from handover.manifest import FILE_NAME as MANIFEST_NAME
from handover.manifest import Manifest

DEFAULT_RESULTS = Path("results")
DEFAULT_URL = "localhost:8001"
API, OPENAI, ADDRESS = "api", "OpenAI", "address"
"""In the settings of an endpoint that is asked through an OpenAI API: which API it is, and its address."""


def find_endpoint(source: str | Path | None, results: Path = DEFAULT_RESULTS, key_env: str | None = None) -> Endpoint:
    """Read the named endpoint, or the newest ``endpoint.json`` below the results, or take localhost:8001.

    Args:
        source: as for ``Endpoint.read``; None for the newest one, or the default.
        results: directory that is searched for the newest one.
        key_env: name of the environment variable with the bearer key of an OpenAI API.

    Raises:
        ServerError: the source names no deployment.
    """
    if source is not None:
        return Endpoint.read(source, key_env)
    newest = max(results.rglob(FILE_NAME), key=lambda path: path.stat().st_mtime, default=None)
    return Endpoint.read(newest if newest is not None else DEFAULT_URL, key_env)


def check_identity(endpoint: Endpoint, model_digest: str | None) -> None:
    """Refuse a deployment that serves another model than that of the digest; None accepts any.

    Raises:
        ServerError: the endpoint has another digest, or its repository was replaced after it started.
    """
    if model_digest is not None and endpoint.model_digest != model_digest:
        raise ServerError(
            f"the endpoint serves model {endpoint.model_digest or 'of unknown digest'}, not {model_digest}",
            "stop that deployment, or deploy the model that you want to measure",
        )
    if not endpoint.model_digest or not endpoint.model_repository:
        return
    try:
        current = Manifest.read(Path(endpoint.model_repository)).digest
    except ArtefactError:
        return  # the repository is on another machine, so that its digest cannot be read
    if current != endpoint.model_digest:
        raise ServerError(
            f"the endpoint serves model {endpoint.model_digest}, but {endpoint.model_repository} now holds {current}",
            "restart the deployment",
        )


def check_server(endpoint: Endpoint, parameters: Mapping[str, str]) -> None:
    """Refuse a server whose model has other weights than the endpoint file says.

    The file may be outdated: its server has exited, and another one listens on the same port.

    Raises:
        ServerError: both have a digest of the weights, and the digests differ.
    """
    said, found = endpoint.settings.get(WEIGHTS_DIGEST), parameters.get(WEIGHTS_DIGEST)
    if said and found and said != found:
        raise ServerError(
            f"the server at {endpoint.grpc_url} serves weights {found}, but the endpoint file says {said}",
            "that deployment is gone, and another has its port: start it again, or give the other one's endpoint file",
        )


def check_unchanged(source: str | Path | None, began: Endpoint, model: str) -> None:
    """Refuse to continue a measurement if the deployment serves another model than when it began.

    The endpoint is read again from the source that ``find_endpoint`` read it from.

    Raises:
        ServerError: the deployment serves another model, or is gone.
    """
    check_identity(find_endpoint(source, key_env=began.openai_key_env), began.model_digest or None)
    check_still_served(began, model)


def check_still_served(began: Endpoint, model: str) -> None:
    """Refuse the answers of a deployment whose repository or server was replaced in the meantime.

    Raises:
        ServerError: one of them was replaced, or no server answers any more.
    """
    check_identity(began, None)
    if began.is_openai:
        with OpenAIClient(began) as asked:
            _check_same(began, identity_of(began, asked.find_model(model), asked.version()))
        return
    with Client(began.grpc_url) as client:
        check_server(began, client.describe(model).parameters)


def identity_of(endpoint: Endpoint, card: ModelCard, version: str) -> Endpoint:
    """Return the endpoint of an OpenAI API with what is known of who serves and of what is served."""
    known = {
        API: OPENAI,
        ADDRESS: endpoint.openai_url,
        "model_root": card.root,
        "max_model_len": "" if card.max_positions is None else str(card.max_positions),
        "server": " ".join(part for part in (card.owned_by, version) if part),
    }
    settings = {**card.settings, **endpoint.settings} | {name: text for name, text in known.items() if text}
    settings.setdefault(VERSIONS, known["server"])  # a deployment of ours has said more in its file
    return replace(endpoint, engine=endpoint.engine or card.owned_by, settings=settings)


def _check_same(began: Endpoint, now: Endpoint) -> None:
    if now.settings != began.settings:
        changed = sorted(set(began.settings.items()) ^ set(now.settings.items()))
        raise ServerError(
            f"{began.openai_url} serves something else than when this began: {dict(changed)}",
            "start again, while that server stays as it is",
        )


def expected_digest(model_digest: str | None, model_repository: Path | None) -> str | None:
    """Return the digest that an endpoint must serve: the given one, or the given repository's; None for any.

    Raises:
        ArtefactError: the repository's manifest is damaged.
    """
    if model_digest is not None or model_repository is None or not (model_repository / MANIFEST_NAME).is_file():
        return model_digest
    return Manifest.read(model_repository).digest
