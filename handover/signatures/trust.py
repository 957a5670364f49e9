"""Verify who signed a directory or a file, and that it is as it was signed."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from handover.errors import ArtefactError, ConfigError
from handover.manifest import FILE_NAME, PROVENANCE, SIGNATURE, Manifest
from handover.regular_file import read_text
from handover.signatures.arguments import TrustArguments
from handover.signatures.hashed import DirectoryHashes, FileDigests
from handover.signatures.keys import read_file
from handover.signatures.library import load, verified_statement

_BLOCK = re.compile(rb"-----BEGIN ([A-Z ]+)-----.*?-----END \1-----", re.DOTALL)
_CHANGED = re.compile(r"Hash mismatch for \\?'(.*?)\\?':")
_UNEQUAL = re.compile(r"(Missing|Extra) files .*?: (.*?)[\"'][,\]]")
_MISMATCH = "Signature mismatch"
_MOST_BYTES = 1 << 30
Verify = Callable[[Any], Any]
"""What is asked of a verifier, a configuration of ``model_signing.verifying``."""


def check_trusted(trusted: Path) -> None:
    """Read the keys and certificates of those who are trusted; ConfigError: they cannot be read."""
    with _verifiers(trusted) as verifiers:
        for _ in verifiers:
            pass


def signature_of(path: Path) -> Path:
    """Return where the signature of a directory or of a file lies."""
    return path / SIGNATURE if path.is_dir() else path.with_name(f"{path.name}.sig")


def verify(path: Path, given: TrustArguments, digests: FileDigests) -> str:
    """Verify the signature of what is about to be used.

    Args:
        path: a directory that a stage has written, or a checkpoint of anybody.
        given: whose signatures count, and whether there must be one.
        digests: learns the files' digests.

    Returns:
        A sentence about the signature; empty where there is none and none is required.

    Raises:
        ArtefactError: it is required and missing, of none who is trusted, or the files are not what was signed.
        ConfigError: ``signing.trusted`` cannot be read, or the library is not installed.
    """
    given.check_trust()
    signature = signature_of(path)
    if not signature.is_file():
        if given.signing_require:
            raise ArtefactError(
                f"{path} is not signed: there is no {signature}, and signing.require=true",
                "sign it where it is made (signing.key), or by model_signing sign",
            )
        return ""
    if given.signing_trusted is None:
        return f"{path} is signed, and no signing.trusted is given to verify that by"
    is_ours = (path / PROVENANCE).is_file()

    def check(verifier: Any) -> None:
        if is_ours:
            verifier.set_hashing_config(DirectoryHashes(digests))
        verifier.verify(path, signature)

    by = _first_that_verifies(given.signing_trusted, signature, check)[0]
    if is_ours:
        _check_manifest(path)
    else:
        _learn(path, signature, digests)
    return f"{path} is as it was signed, by {by}"


def read_statement(path: Path, trusted: Path) -> dict[str, Any]:
    """Verify who signed a statement, such as a provenance, and return it.

    Raises:
        ArtefactError: none who is trusted.
    """
    _, statement = _first_that_verifies(trusted, path, lambda verifier: verified_statement(verifier, path))
    return dict(statement)


def unverified_payload(bundle: Path) -> dict[str, Any]:
    """Read the statement of a bundle whose signature is verified elsewhere, as by the signature of its directory."""
    content = json.loads(read_text(bundle, _MOST_BYTES))
    payload: dict[str, Any] = json.loads(b64decode(content["dsseEnvelope"]["payload"]))
    return payload


def _first_that_verifies(trusted: Path, signature: Path, check: Verify) -> tuple[str, Any]:
    """Ask one after another of those who are trusted; return who it was, and what the check returned."""
    with _verifiers(trusted) as verifiers:
        for name, verifier in verifiers:
            try:
                return name, check(verifier)
            except (ArtefactError, ConfigError, OSError):
                raise
            except Exception as error:  # cryptography, OpenSSL, pydantic and the library itself have their own
                if str(error).startswith(_MISMATCH):
                    raise ArtefactError(
                        f"{signature.parent} is not what was signed\n  " + "\n  ".join(_differences(str(error))),
                        "take it again from where it was signed; what was changed on purpose must be signed again",
                    ) from None
    raise ArtefactError(
        f"{signature} is no signature of anybody in {trusted}",
        "add the public key or the certificate of who signed it to signing.trusted, if you trust them",
    )


def _differences(text: str) -> list[str]:
    """Read from the library's error which files are other than they were, and leave the bytes of digests out."""
    found = [f"{name}  has another content" for name in _CHANGED.findall(text)]
    for what, names in _UNEQUAL.findall(text):
        found += [f"{name}  {'is missing' if what == 'Missing' else 'was not signed'}" for name in names.split(", ")]
    return found or [text]


@contextmanager
def _verifiers(trusted: Path) -> Iterator[Iterator[tuple[str, Any]]]:
    """Make a verifier for each public key of a PEM file, and one for all of its certificates."""
    verifying = load("model_signing.verifying", "signing.trusted")
    blocks = [(match[1], match[0] + b"\n") for match in _BLOCK.finditer(read_file("signing.trusted", trusted))]
    keys = [block for kind, block in blocks if kind == b"PUBLIC KEY"]
    certificates = b"".join(block for kind, block in blocks if kind == b"CERTIFICATE")
    if len(keys) + certificates.count(b"BEGIN") != len(blocks) or not blocks:
        raise ConfigError(
            f"signing.trusted: {trusted} must hold public keys and certificates in PEM, and nothing else",
            "openssl ec -in key.pem -pubout -out public.pem writes the public key of a private one",
        )
    with TemporaryDirectory() as directory:
        file = Path(directory) / "one.pem"  # the library reads files

        def each() -> Iterator[tuple[str, Any]]:
            for number, block in enumerate([*keys, *([certificates] if certificates else [])], 1):
                file.write_bytes(block)
                is_key, config = number <= len(keys), verifying.Config()
                name = f"public key {number}" if is_key else "certificates"
                try:
                    if is_key:
                        config.use_elliptic_key_verifier(public_key=file)
                    else:
                        config.use_certificate_verifier(certificate_chain=[file])
                except Exception as error:
                    raise ConfigError(f"signing.trusted: {name} of {trusted} cannot be read: {error}") from None
                yield f"{name} of {trusted}", config

        yield each()


def _check_manifest(root: Path) -> None:
    """Compare what the manifest says beyond the files with the provenance, which the directory's signature covers.

    Raises:
        ArtefactError: it says something else.
    """
    signed = unverified_payload(root / PROVENANCE)["predicate"]["buildDefinition"]["externalParameters"]
    if signed != json.loads(json.dumps(Manifest.read(root).made_from)):
        raise ArtefactError(
            f"{root / FILE_NAME} says that its files were made from something else than {PROVENANCE} does",
            "take it again from where it was signed",
        )


def _learn(path: Path, signature: Path, digests: FileDigests) -> None:
    """Take the digests of files that a signature of anybody has just proved."""
    predicate = unverified_payload(signature).get("predicate", {})
    for each in predicate.get("resources", ()) if predicate.get("serialization", {}).get("method") == "files" else ():
        if each["algorithm"] == "sha256":
            digests.know(path / each["name"] if path.is_dir() else path, each["digest"])
