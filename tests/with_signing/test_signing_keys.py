"""Keys of every kind sign, bad ones are refused before anything is written, and none is shown anywhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.runs.signing_keys import PASSWORD, Keys

from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert
from handover.errors import ConfigError
from handover.signatures.arguments import SigningArguments, TrustArguments
from handover.signatures.hashed import FileDigests
from handover.signatures.keys import open_key
from handover.signatures.trust import check_trusted, verify

PROJECT = Path(__file__).resolve().parents[2]
CHECKPOINT = PROJECT / "examples/gpt3_demo/checkpoints/gpt3_demo.nemo"
PIN = "48151623"


def signed(output: Path, **signing: Any) -> Path:
    convert(ConvertArguments(CHECKPOINT, output, weight_data_type="fp16", **signing))
    return output


def verified(root: Path, trusted: Path) -> str:
    return verify(root, TrustArguments(signing_trusted=trusted, signing_require=True), FileDigests())


def model_signing(root: Path, *words: object) -> subprocess.CompletedProcess[str]:
    signature = "--signature", root / "model.sig"
    command = [sys.executable, "-m", "model_signing", "verify", words[0], root, *signature, *words[1:]]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True)


def nothing_shows(root: Path, secrets: list[str]) -> None:
    for path in root.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        assert not [secret for secret in secrets if secret.encode() in content], path


def test_a_key_with_a_password(keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELEASE_KEY_PASSWORD", PASSWORD)
    root = signed(tmp_path / "1-gpu", signing_key=str(keys.locked), signing_password_env="RELEASE_KEY_PASSWORD")
    assert "public key 1" in verified(root, keys.locked_public)
    assert model_signing(root, "key", "--public_key", keys.locked_public).returncode == 0
    nothing_shows(tmp_path, [PASSWORD, secret_of(keys.locked)])


def secret_of(key: Path) -> str:
    """A line in the middle of a private key's file."""
    return key.read_text().splitlines()[2][:40]


@pytest.mark.parametrize("place", ["file", "file with a password", "token"])
def test_a_key_with_certificates_is_verified_by_the_root(
    place: str, keys: Keys, token: Callable[[Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"signing_key": str(keys.certified), "signing_certificates": keys.certificates}
    if place == "token":
        monkeypatch.setenv("SECRET", PIN)
        given |= {"signing_key": token(keys.certified), "signing_password_env": "SECRET"}
    elif place == "file with a password":
        monkeypatch.setenv("SECRET", PASSWORD)
        given |= {"signing_key": str(keys.certified_locked), "signing_password_env": "SECRET"}
    root = signed(tmp_path / "1-gpu", **given)
    assert "by certificates of" in verified(root, keys.root)
    assert model_signing(root, "certificate", "--certificate_chain", keys.root).returncode == 0
    assert model_signing(root, "certificate", "--certificate_chain", keys.others_root).returncode == 1
    nothing_shows(root, [secret_of(keys.certified), PIN, PASSWORD])


def test_certificates_of_another_key_than_the_tokens_are_refused(
    keys: Keys, token: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN_PIN", PIN)
    given = SigningArguments(
        signing_key=token(keys.key), signing_password_env="TOKEN_PIN", signing_certificates=keys.certificates
    )
    with pytest.raises(ConfigError, match="is not that of signing.key pkcs11:token=release"):
        open_key(given)


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], str]:
    """A token of SoftHSM that holds a key; returns the key's name."""

    def made(key: Path) -> str:
        (tokens := tmp_path / "tokens").mkdir()
        (tmp_path / "softhsm2.conf").write_text(f"directories.tokendir = {tokens}\nlog.level = ERROR\n")
        monkeypatch.setenv("SOFTHSM2_CONF", str(tmp_path / "softhsm2.conf"))
        pins = "--pin", PIN, "--so-pin", "9999"
        initialise = ["--init-token", "--free", "--label", "release", *pins]
        holds = ["--import", str(key), "--token", "release", "--label", "models", "--id", "a1", *pins]
        for words in (initialise, holds):
            subprocess.run(["softhsm2-util", *words], check=True, capture_output=True)
        return "pkcs11:token=release;object=models?module-path=/usr/lib/softhsm/libsofthsm2.so"

    return made


def test_a_key_in_a_token_by_its_name(
    keys: Keys, token: Callable[[Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = token(keys.key)
    monkeypatch.setenv("TOKEN_PIN", PIN)
    root = signed(tmp_path / "1-gpu", signing_key=name, signing_password_env="TOKEN_PIN")
    assert "public key 1" in verified(root, keys.public)
    assert model_signing(root, "key", "--public_key", keys.public).returncode == 0
    nothing_shows(root, [PIN])
    monkeypatch.setenv("TOKEN_PIN", "1000001")
    with pytest.raises(ConfigError) as wrong:
        open_key(SigningArguments(signing_key=name, signing_password_env="TOKEN_PIN"))
    assert "cannot be opened" in str(wrong.value) and "1000001" not in str(wrong.value)


BAD: dict[str, tuple[Callable[[Keys, Path], dict[str, Any]], str]] = {
    "no file": (lambda keys, tmp: {"signing_key": str(tmp / "none.pem")}, "signing.key: .*none.pem cannot be read"),
    "a directory": (lambda keys, tmp: {"signing_key": str(tmp)}, "signing.key: .* cannot be read: Is a directory"),
    "a public key": (lambda keys, tmp: {"signing_key": str(keys.public)}, "is no private key in PEM"),
    "RSA": (lambda keys, tmp: {"signing_key": str(keys.rsa)}, "is no key of the curves secp256r1"),
    "locked": (lambda keys, tmp: {"signing_key": str(keys.locked)}, "has a password"),
    "wrong password": (
        lambda keys, tmp: {"signing_key": str(keys.locked), "signing_password_env": "WRONG"},
        "is no private key in PEM, or its password is another",
    ),
    "needless password": (
        lambda keys, tmp: {"signing_key": str(keys.key), "signing_password_env": "WRONG"},
        "has no password",
    ),
    "password not set": (
        lambda keys, tmp: {"signing_key": str(keys.locked), "signing_password_env": "NOT_SET"},
        "signing.password_env does not name a variable",
    ),
    "password without a key": (lambda keys, tmp: {"signing_password_env": "WRONG"}, "without signing.key"),
    "certificates without a key": (lambda keys, tmp: {"signing_certificates": keys.root}, "without signing.key"),
    "certificates that are none": (
        lambda keys, tmp: {"signing_key": str(keys.key), "signing_certificates": keys.public},
        "signing.certificates: .* holds no certificates",
    ),
    "no certificates' file": (
        lambda keys, tmp: {"signing_key": str(keys.key), "signing_certificates": tmp / "none.crt"},
        "signing.certificates: .*none.crt cannot be read",
    ),
    "another's certificate": (
        lambda keys, tmp: {"signing_key": str(keys.key), "signing_certificates": keys.certificates},
        "is not that of signing.key",
    ),
    "expired": (
        lambda keys, tmp: {"signing_key": str(keys.certified), "signing_certificates": keys.expired},
        "is valid from",
    ),
    "key itself": (lambda keys, tmp: {"signing_key": keys.key.read_text()}, "holds a key itself"),
    "PIN in the name": (
        lambda keys, tmp: {"signing_key": f"pkcs11:token=x;object=y?pin-value={PIN}"},
        "holds a PIN",
    ),
    "no such token": (
        lambda keys, tmp: {"signing_key": "pkcs11:token=x;object=y?module-path=/usr/lib/softhsm/libsofthsm2.so"},
        "cannot be opened",
    ),
    "required without trusted": (lambda keys, tmp: {"signing_require": True}, "without signing.trusted"),
    "no file of trusted": (lambda keys, tmp: {"signing_trusted": tmp / "none.pem"}, "signing.trusted: .*none.pem"),
    "private key trusted": (lambda keys, tmp: {"signing_trusted": keys.key}, "must hold public keys and certificates"),
    "RSA trusted": (
        lambda keys, tmp: {"signing_trusted": keys.rsa.with_name("rsa.pub.pem")},
        "public key 1 of .* cannot be read",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_key_is_one_clear_error_before_anything_is_written(
    case: str, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WRONG", "another-password")
    given, expected = BAD[case]
    with pytest.raises(ConfigError) as refused:
        signed(tmp_path / "out", **given(keys, tmp_path))
    shown = f"{refused.value}{''.join(capfd.readouterr())}"
    assert re.search(expected, shown) and not (tmp_path / "out").exists()
    for secret in ("another-password", PIN, secret_of(keys.key)):
        assert secret not in shown


def test_several_keys_and_certificates_can_be_trusted(keys: Keys, tmp_path: Path) -> None:
    together = tmp_path / "trusted.pem"
    together.write_bytes(
        b"# ours\n" + keys.public.read_bytes() + keys.root.read_bytes() + keys.others_public.read_bytes()
    )
    check_trusted(together)


@pytest.mark.parametrize("asked", [["--signing-key={key}"], ["--signing-trusted={public}", "--signing-require=true"]])
def test_without_the_extra_nothing_is_written(asked: list[str], keys: Keys, tmp_path: Path) -> None:
    words = [word.format(key=keys.key, public=keys.public) for word in asked]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    program = [
        sys.executable,
        "-m",
        "export_scripts.convert",
        f"--checkpoint={CHECKPOINT}",
        f"--output={tmp_path / 'out'}",
    ]
    found = subprocess.run([*program, *words], cwd=PROJECT, env=environment, capture_output=True, text=True)
    assert found.returncode == 1 and found.stderr.count("\n") == 2
    assert "pip install 'slipway[signing]'" in found.stderr and not (tmp_path / "out").exists()
