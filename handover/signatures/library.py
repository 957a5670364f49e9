"""The way to ``model-signing``, which is there where somebody signs or verifies.

Its interface signs and verifies directories. Statements of other types, such as provenance, need the signer and the
verifier behind it, which have no public name: pyproject.toml pins the versions that have them.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from handover.errors import ConfigError

PAYLOAD_TYPE = "application/vnd.in-toto+json"


def load(name: str, asked_by: str) -> ModuleType:
    """Import a module of the library.

    Args:
        name: of the module.
        asked_by: the key that needs it, for the error.

    Raises:
        ConfigError: the library is not installed.
    """
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{asked_by} is given, and this Python lacks what signs and verifies: {error}",
            "pip install 'slipway[signing]', also into the container of the stage",
        ) from None


def sign_statement(config: Any, statement: dict[str, Any], path: Path) -> None:
    """Sign an in-toto statement and write it as a Sigstore bundle, as ``model.sig`` is one.

    Args:
        config: of ``model_signing.signing``, with a signer.
        statement: the statement.
        path: of the bundle.
    """
    message = load("in_toto_attestation.v1.statement_pb2", "signing.key").Statement()
    load("google.protobuf.json_format", "signing.key").ParseDict(statement, message)
    config._signer.sign(SimpleNamespace(statement=SimpleNamespace(pb=message))).write(path)


def verified_statement(config: Any, path: Path) -> dict[str, Any]:
    """Verify the signature of a bundle and return the statement in it.

    Args:
        config: of ``model_signing.verifying``, with a verifier.
        path: of the bundle.

    Raises:
        ValueError: or another error of the library: it is no bundle, or another key has signed it.
    """
    signature = load("model_signing._signing.sign_sigstore_pb", "signing.trusted").Signature.read(path)
    kind, payload = config._verifier._verify_signed_content(signature)
    if kind != PAYLOAD_TYPE:
        raise ValueError(f"it holds {kind}, no in-toto statement")
    statement: dict[str, Any] = json.loads(payload)
    return statement
