"""What programs are given to sign what they write, and to verify what they read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from handover.arguments import ScriptArguments, option
from handover.errors import ConfigError

PKCS11 = "pkcs11:"
"""Begin of the name of a key that a token or a security module holds."""


@dataclass(frozen=True, kw_only=True)
class TrustArguments(ScriptArguments):
    """Whose signatures count."""

    signing_trusted: Path | None = option(
        None, "PEM file of public keys and certificates: signatures of others are refused; without it none is verified"
    )
    signing_require: bool | None = option(None, "refuse what has no signature")

    def check_trust(self) -> None:
        """Refuse to require signatures where no key is trusted; ConfigError."""
        if self.signing_require and self.signing_trusted is None:
            raise ConfigError(
                "signing.require=true without signing.trusted: no signature can be verified",
                "name a PEM file with the public keys or certificates of those who may sign: signing.trusted=keys.pem",
            )


@dataclass(frozen=True, kw_only=True)
class SigningArguments(TrustArguments):
    """By which key what is written is signed, and whose signatures of what is read count."""

    signing_key: str | None = option(
        None, "PEM file of an elliptic curve's private key, or pkcs11:...; without it nothing is signed"
    )
    signing_password_env: str | None = option(
        None, "environment variable with the key's password, or with the PIN of its PKCS#11 token"
    )
    signing_certificates: Path | None = option(
        None, "PEM file of the key's certificate, followed by those of who issued it; without it the key alone signs"
    )

    def check_signing(self) -> None:
        """Refuse what cannot be meant, and secrets in a key's place, which are not shown; ConfigError."""
        self.check_trust()
        if self.signing_key is None:
            for name in ("password_env", "certificates"):
                if getattr(self, f"signing_{name}") is not None:
                    raise ConfigError(
                        f"signing.{name} is given without signing.key, to which it belongs",
                        "give signing.key=key.pem too, or leave it out",
                    )
        elif "PRIVATE KEY" in self.signing_key or "\n" in self.signing_key:
            raise ConfigError(
                "signing.key holds a key itself, which would stand in plans and logs", "name the file that has it"
            )
        elif self.signing_key.startswith(PKCS11) and "pin-value" in self.signing_key:
            raise ConfigError(
                "signing.key holds a PIN (pin-value), which would stand in plans and logs",
                "export the PIN and name its variable: signing.password_env=TOKEN_PIN",
            )
