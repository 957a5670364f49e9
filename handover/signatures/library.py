"""The way to ``model-signing``, which is there where somebody signs or verifies.

Its interface signs and verifies directories. Statements of other types, such as provenance, need the signer and the
verifier behind it, which have no public name: pyproject.toml pins the versions that have them.
"""

from __future__ import annotations

import base64
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


def public_key_of(config: Any) -> Any:
    """Return the public key of a configuration's signer, whose private one is in a token."""
    return config._signer.public_key()


def certify(config: Any, certificates: bytes) -> Any:
    """Have a signer of any kind put certificates in the place of its public key into what it signs.

    The library's own signers with certificates take no key with a password, and for a token write what none reads.

    Args:
        config: of ``model_signing.signing``, with a signer.
        certificates: in PEM, the key's own first.

    Returns:
        The configuration.
    """
    x509 = load("cryptography.x509", "signing.certificates")
    bundle, common = (load(f"sigstore_models.{name}.v1", "signing.certificates") for name in ("bundle", "common"))
    der = load("cryptography.hazmat.primitives.serialization", "signing.certificates").Encoding.DER
    contents = (base64.b64encode(each.public_bytes(der)) for each in x509.load_pem_x509_certificates(certificates))
    chain = common.X509CertificateChain(certificates=[common.X509Certificate(raw_bytes=each) for each in contents])
    material = bundle.VerificationMaterial(x509_certificate_chain=chain, tlog_entries=[])
    config._signer._get_verification_material = lambda: material
    return config


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
