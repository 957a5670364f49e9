"""Keys and certificates of several kinds, made by ``cryptography``."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

PASSWORD = "a-Password-that-Nothing-may-Show"


@dataclass(frozen=True)
class Keys:
    """Files in PEM: a key and its public part, another's, one with a password, and one with certificates."""

    key: Path
    public: Path
    other: Path
    others_public: Path
    locked: Path
    locked_public: Path
    certified: Path
    certified_locked: Path
    certificates: Path
    root: Path
    others_root: Path
    expired: Path
    rsa: Path


def make_keys(directory: Path) -> Keys:
    """Write all of them."""
    from cryptography.hazmat.primitives.asymmetric import ec, rsa
    from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, NoEncryption

    def written(name: str, key: Any, encryption: Any = None) -> tuple[Path, Path]:
        private, public = directory / f"{name}.pem", directory / f"{name}.pub.pem"
        private.write_bytes(_private(key, encryption or NoEncryption()))
        public.write_bytes(_public(key))
        return private, public

    curve = ec.SECP256R1()
    key, other, locked, certified, issuer = (ec.generate_private_key(curve) for _ in range(5))
    root, leaf = _certificate("root", issuer, "root", issuer), _certificate("release", certified, "root", issuer)
    expired = _certificate("release", certified, "root", issuer, days=-1)
    files = {"root": root, "certificates": leaf + root, "expired": expired}
    files["others_root"] = _certificate("root", other, "root", other)
    for name, content in files.items():
        (directory / f"{name}.crt").write_bytes(content)
    rsa_key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return Keys(
        *written("key", key),
        *written("other", other),
        *written("locked", locked, BestAvailableEncryption(PASSWORD.encode())),
        written("certified", certified)[0],
        written("certified_locked", certified, BestAvailableEncryption(PASSWORD.encode()))[0],
        directory / "certificates.crt",
        directory / "root.crt",
        directory / "others_root.crt",
        directory / "expired.crt",
        written("rsa", rsa_key)[0],
    )


def _private(key: Any, encryption: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, PrivateFormat

    content: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)
    return content


def _public(key: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    content: bytes = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return content


def _certificate(name: str, key: Any, issuer: str, issuers_key: Any, days: int = 30) -> bytes:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.serialization import Encoding

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    now, is_root = datetime.now(timezone.utc), name == issuer
    usage = dict.fromkeys(
        (
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    content: bytes = (
        x509.CertificateBuilder()
        .subject_name(named(name))
        .issuer_name(named(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=10))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=is_root, path_length=None), critical=True)
        .add_extension(
            x509.KeyUsage(digital_signature=True, key_cert_sign=is_root, crl_sign=is_root, **usage), critical=True
        )
        .sign(issuers_key, hashes.SHA256())
        .public_bytes(Encoding.PEM)
    )
    return content
