"""The key that signs, opened before anything is written: a PEM file, or the name of a key in a PKCS#11 token."""

from __future__ import annotations

import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import quote

from handover.errors import ConfigError, shortened
from handover.signatures.arguments import PKCS11, SigningArguments
from handover.signatures.library import certify, load, public_key_of

_CURVES = ("secp256r1", "secp384r1", "secp521r1")
_HOW = "openssl ecparam -name prime256v1 -genkey -noout -out key.pem makes one"


def open_key(given: SigningArguments) -> Any:
    """Open the key.

    Returns:
        A configuration of ``model_signing.signing`` with its signer; None where no key is given.

    Raises:
        ConfigError: the library, the key, its password or a certificate is missing, cannot be read, or does not fit.
    """
    given.check_signing()
    if given.signing_key is None:
        return None
    config = load("model_signing.signing", "signing.key").Config()
    password = _password(given)
    certificates = given.signing_certificates
    certified = None if certificates is None else _check_certificates(certificates)
    if given.signing_key.startswith(PKCS11):
        opened = _open_token(config, given.signing_key, password)
        public = public_key_of(opened)
    else:
        path = Path(given.signing_key)
        public = _check_file(path, password)
        opened = config.use_elliptic_key_signer(private_key=path, password=password and password.encode())
    if certificates is None:
        return opened
    if public != certified:
        raise ConfigError(
            f"signing.certificates: the first certificate of {certificates} is not that of signing.key"
            f" {given.signing_key}",
            "put the key's own certificate first, then that of its issuer",
        )
    return certify(opened, read_file("signing.certificates", certificates))


def read_file(key: str, path: Path) -> bytes:
    """Read a small file that a key of the configuration names; ConfigError: it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error.strerror}", "name a PEM file") from None


def _password(given: SigningArguments) -> str | None:
    name = given.signing_password_env
    if name is None:
        return None
    if name not in os.environ:
        raise ConfigError(
            "signing.password_env does not name a variable of this environment",
            "export the password, and give the variable's name: signing.password_env=KEY_PASSWORD",
        )
    return os.environ[name]


def _check_file(path: Path, password: str | None) -> Any:
    """Read the key as the library will; nothing of it is shown.

    Returns:
        The public key.
    """
    content = read_file("signing.key", path)
    serialization = load("cryptography.hazmat.primitives.serialization", "signing.key")
    curves = load("cryptography.hazmat.primitives.asymmetric.ec", "signing.key")
    try:
        key = serialization.load_pem_private_key(content, password and password.encode())
    except TypeError:
        what = "has a password" if password is None else "has no password"
        hint = "name its variable in signing.password_env" if password is None else "leave signing.password_env out"
        raise ConfigError(f"signing.key: {path} {what}", hint) from None
    except Exception:  # the library has several; their texts are about ASN.1
        wrong = "no private key in PEM" if password is None else "no private key in PEM, or its password is another"
        raise ConfigError(f"signing.key: {path} is {wrong}", _HOW) from None
    if not isinstance(key, curves.EllipticCurvePrivateKey) or key.curve.name not in _CURVES:
        raise ConfigError(f"signing.key: {path} is no key of the curves {', '.join(_CURVES)}", _HOW)
    return key.public_key()


def _check_certificates(path: Path) -> Any:
    """Return the public key of the first certificate, once it is known that a verifier will take it."""
    x509 = load("cryptography.x509", "signing.certificates")
    content = read_file("signing.certificates", path)
    try:
        leaf = x509.load_pem_x509_certificates(content)[0]
    except ValueError:
        raise ConfigError(f"signing.certificates: {path} holds no certificates in PEM") from None
    now = datetime.now(timezone.utc)
    if not leaf.not_valid_before_utc <= now <= leaf.not_valid_after_utc:
        raise ConfigError(
            f"signing.certificates: the first certificate of {path} is valid from {leaf.not_valid_before_utc} "
            f"to {leaf.not_valid_after_utc}, and now is {now}",
            "have the key certified again",
        )
    usages = {type(each.value): each.value for each in leaf.extensions}
    key_usage, extended = usages.get(x509.KeyUsage), usages.get(x509.ExtendedKeyUsage, ())
    code_signing = x509.oid.ExtendedKeyUsageOID.CODE_SIGNING
    if not (key_usage and key_usage.digital_signature) and code_signing not in extended:
        raise ConfigError(
            f"signing.certificates: the first certificate of {path} is not for signatures",
            "it needs the key usage digitalSignature, or the extended one codeSigning",
        )
    return leaf.public_key()


def _open_token(config: Any, name: str, pin: str | None) -> Any:
    """Open a key in a token; the PIN joins its name here alone."""
    uri = name if pin is None else f"{name}{'&' if '?' in name else '?'}pin-value={quote(pin, safe='')}"
    try:
        return config.use_pkcs11_signer(pkcs11_uri=uri)
    except Exception as error:  # PyKCS11 and the library have their own; some of them quote the name
        why = str(error) or type(error).__name__
        for secret in {pin, quote(pin, safe="")} if pin else ():
            why = why.replace(secret, "...")
        hint = "such as pkcs11:token=release;object=models?module-path=/usr/lib/softhsm/libsofthsm2.so"
        if "pykcs11" in why.lower():
            hint = "pip install 'slipway[signing]' brings the way to tokens, PyKCS11"
        raise ConfigError(f"signing.key: {name} cannot be opened: {shortened(why)}", hint) from None
