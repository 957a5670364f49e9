"""What convert and export sign, verified by model-signing, in-toto, securesystemslib and CycloneDX themselves."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.model.bom import Bom
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from google.protobuf import json_format
from in_toto_attestation.v1 import statement_pb2
from in_toto_attestation.v1.statement import Statement
from securesystemslib.dsse import Envelope
from securesystemslib.signer import SSlibKey
from support.runs.signing_keys import Keys

from deployment.arguments import ServeArguments
from deployment.serve import prepare
from export_scripts import inspect
from export_scripts.arguments import ConvertArguments, ExportArguments
from export_scripts.convert import convert
from export_scripts.repository.model_repository import build_repository
from handover.digests import file_digest
from handover.errors import ArtefactError
from handover.manifest import FileRecord, Manifest
from handover.signatures.arguments import TrustArguments
from handover.signatures.hashed import FileDigests
from handover.signatures.trust import verify

CHECKPOINT = Path("examples/gpt3_demo/checkpoints/gpt3_demo.nemo").absolute()


def converted(output: Path, keys: Keys, **more: Any) -> Path:
    signing = {"signing_key": str(keys.key), "signing_trusted": keys.public, **more}
    convert(ConvertArguments(CHECKPOINT, output, weight_data_type="fp32", **signing))
    return output


def exported(output: Path, checkpoint: Path, keys: Keys, **more: Any) -> Path:
    signing = {"signing_key": str(keys.key), "signing_trusted": keys.public, **more}
    build_repository(ExportArguments(checkpoint, output, "demo", 1, 1, "fp32", 0, 0, 4, **signing))
    return output


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, keys: Keys) -> Path:
    return converted(tmp_path_factory.mktemp("signed") / "1-gpu", keys)


@pytest.fixture(scope="module")
def repository(checkpoint: Path, keys: Keys) -> Path:
    return exported(checkpoint.parent / "model_repo", checkpoint, keys)


def model_signing(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "model_signing", *map(str, words)], capture_output=True, text=True)


def bundle(path: Path) -> tuple[Envelope, dict[str, Any]]:
    """The envelope as securesystemslib has it, and the statement as in-toto's own classes take it."""
    content = json.loads(path.read_text())["dsseEnvelope"]
    envelope = Envelope.from_dict(
        {
            "payload": content["payload"],
            "payloadType": content["payloadType"],
            "signatures": [{"keyid": "", "sig": content["signatures"][0]["sig"]}],
        }
    )
    message = json_format.Parse(base64.b64decode(content["payload"]), statement_pb2.Statement())
    Statement.copy_from_pb(message).validate()
    return envelope, json.loads(base64.b64decode(content["payload"]))


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_model_signing_itself_verifies_what_is_written(repository: Path, checkpoint: Path, keys: Keys) -> None:
    for root in (checkpoint, repository):
        key = "--public_key", keys.public
        found = model_signing("verify", "key", root, "--signature", root / "model.sig", *key)
        assert (found.returncode, found.stdout) == (0, "Verification succeeded\n")
    wrong = model_signing("verify", "key", root, "--signature", root / "model.sig", "--public_key", keys.others_public)
    assert wrong.returncode


@pytest.mark.parametrize("name", ["checkpoint", "repository"])
def test_provenance_states_what_was_made_from_what(name: str, checkpoint: Path, repository: Path, keys: Keys) -> None:
    root = {"checkpoint": checkpoint, "repository": repository}[name]
    envelope, statement = bundle(root / "provenance.intoto.json")
    envelope.verify([SSlibKey.from_dict("", _public(keys))], 1)
    subjects = {each["name"]: each["digest"]["sha256"] for each in statement["subject"]}
    manifest = Manifest.read(root)
    expected = {record.path for record in manifest.files} | {"bom.cdx.json"}
    assert subjects == {path: sha256(root / path) for path in expected}
    definition = statement["predicate"]["buildDefinition"]
    assert definition["externalParameters"] == json.loads(json.dumps(manifest.made_from))
    materials = {each["name"]: each["digest"]["sha256"] for each in definition["resolvedDependencies"]}
    if root == checkpoint:
        assert materials == {CHECKPOINT.name: sha256(CHECKPOINT)}
    else:
        assert materials == {
            record.path: sha256(checkpoint / record.path) for record in Manifest.read(checkpoint).files
        }
    assert {"slipway", "python", "numpy"} <= statement["predicate"]["runDetails"]["builder"]["version"].keys()


def _public(keys: Keys) -> dict[str, Any]:
    return {"keytype": "ecdsa", "scheme": "ecdsa-sha2-nistp256", "keyval": {"public": keys.public.read_text()}}


def test_the_bill_is_valid_cyclonedx(checkpoint: Path, repository: Path) -> None:
    for root in (checkpoint, repository):
        text = (root / "bom.cdx.json").read_text()
        assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
        read = Bom.from_json(json.loads(text))
        assert read.metadata.component.type.value == "machine-learning-model"
        files = {each.name: each.hashes[0].content for each in read.metadata.component.components}
        assert files == {record.path: sha256(root / record.path) for record in Manifest.read(root).files}


def test_signing_changes_nothing_of_the_model(checkpoint: Path, tmp_path: Path) -> None:
    unsigned = convert(ConvertArguments(CHECKPOINT, tmp_path / "plain", weight_data_type="fp32"))
    assert unsigned.digest == Manifest.read(checkpoint).digest
    assert not {"model.sig", "bom.cdx.json", "provenance.intoto.json"} & set(map(str, (tmp_path / "plain").iterdir()))


def damage(path: Path) -> None:
    """Change a bit, in a file of its own if it was a link to another's content."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()
    path.write_bytes(content)


def edit(root: Path) -> None:
    path = root / "ensemble" / "config.pbtxt"
    content = path.read_text()
    path.write_text(content + "\n")


def edit_with_the_manifest(root: Path) -> None:
    edit(root)
    manifest = json.loads((root / "manifest.json").read_text())
    records = Manifest.read(root).files
    path = root / "ensemble" / "config.pbtxt"
    changed = [vars(r) if r.path != "ensemble/config.pbtxt" else {**vars(r), "size_bytes": path.stat().st_size,
               "digest": f"sha256:{sha256(path)}"} for r in records]  # fmt: skip
    made = {key: manifest[key] for key in ("kind", "made_from", "made_by", "fingerprint")}
    Manifest(files=tuple(FileRecord(**each) for each in changed), **made).save(root)


def change_a_weight(root: Path) -> None:
    damage(next((root / "fastertransformer" / "1" / "1-gpu").glob("*dense_h_to_4h.weight*")))


def say_other_origin(root: Path) -> None:
    text = (root / "manifest.json").read_text()
    assert "gpt3_demo.nemo" in text
    (root / "manifest.json").write_text(text.replace("gpt3_demo.nemo", "another.nemo"))


def plant(root: Path) -> None:
    (root / "preprocessing" / "1" / "sitecustomize.py").write_text("")


def link(root: Path) -> None:
    path = root / "ensemble" / "config.pbtxt"
    path.rename(root.parent / "elsewhere")
    path.symlink_to(root.parent / "elsewhere")


def lose(root: Path) -> None:
    (root / "postprocessing" / "config.pbtxt").unlink()


def unsign(root: Path) -> None:
    (root / "model.sig").unlink()


def cut(root: Path) -> None:
    content = (root / "model.sig").read_text()
    (root / "model.sig").write_text(content[: len(content) // 2])


def lose_provenance(root: Path) -> None:
    (root / "provenance.intoto.json").unlink()


DAMAGES: dict[Callable[[Path], None], str] = {
    edit: "ensemble/config.pbtxt  has another content",
    edit_with_the_manifest: "ensemble/config.pbtxt  has another content",
    change_a_weight: "dense_h_to_4h.weight.0.bin  has another content",
    say_other_origin: "says that its files were made from something else",
    plant: "preprocessing/1/sitecustomize.py  was not signed",
    link: "is a link",
    lose: "postprocessing/config.pbtxt  is missing",
    unsign: "is not signed",
    cut: "is no signature of anybody",
    lose_provenance: "provenance.intoto.json  is missing",
}


@pytest.mark.parametrize("done", DAMAGES, ids=lambda done: done.__name__)
def test_what_is_not_as_it_was_signed_is_refused_before_a_server_starts(
    done: Callable[[Path], None], repository: Path, keys: Keys, tmp_path: Path
) -> None:
    root = tmp_path / "model_repo"
    shutil.copytree(repository, root)
    trusted = {"signing_trusted": keys.public, "signing_require": True}
    arguments = ServeArguments(root, tmp_path / "endpoint.json", tmp_path / "server.log", **trusted)
    done(root)
    with pytest.raises(ArtefactError, match=DAMAGES[done]):
        prepare(arguments)
    with pytest.raises(ArtefactError, match=DAMAGES[done]):
        inspect.main([str(root), f"--trusted={keys.public}", "--require"])


def test_a_repository_is_served_as_it_was_signed(
    repository: Path, keys: Keys, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trusted = {"signing_trusted": keys.public, "signing_require": True}
    models, edited = prepare(ServeArguments(repository, tmp_path / "endpoint.json", tmp_path / "server.log", **trusted))
    assert models and not edited
    shown = "".join(capsys.readouterr())
    assert f"signature  {repository} is as it was signed, by public key 1 of {keys.public}" in shown


def test_only_those_who_are_trusted_count(repository: Path, keys: Keys, tmp_path: Path) -> None:
    def found(*files: Path) -> str:
        together = tmp_path / "trusted.pem"
        together.write_bytes(b"".join(file.read_bytes() for file in files))
        return verify(repository, TrustArguments(signing_trusted=together), FileDigests())

    with pytest.raises(ArtefactError, match="no signature of anybody"):
        found(keys.others_public, keys.root)
    assert "by public key 2 of" in found(keys.others_public, keys.public, keys.root)
    assert "no signing.trusted" in verify(repository, TrustArguments(), FileDigests())


def test_inspect_says_that_a_signature_was_verified(
    checkpoint: Path, repository: Path, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    for root in (checkpoint, repository):
        inspect.main([str(root), f"--trusted={keys.public}", "--require"])
        assert f"{root} is as it was signed, by public key 1 of {keys.public}" in capsys.readouterr().out


def test_each_content_is_read_once(tmp_path: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    monkeypatch.setattr("handover.signatures.hashed.file_digest", lambda path: read.append(path) or file_digest(path))
    root = converted(tmp_path / "1-gpu", keys)
    assert len({path.resolve() for path in read}) == len(read)
    weights = {path for path in read if path.suffix == ".bin"}
    assert weights == set(root.glob("*.bin")) and CHECKPOINT in read
    read.clear()
    exported(tmp_path / "model_repo", root, keys)
    assert read and not any(path.suffix == ".bin" for path in read)


def test_a_checkpoint_that_was_changed_after_its_signature_does_not_pass_as_a_repository(
    tmp_path: Path, keys: Keys
) -> None:
    root = converted(tmp_path / "1-gpu", keys)
    damage(next(root.glob("*dense_h_to_4h.weight*")))
    repository = exported(tmp_path / "model_repo", root, keys)
    with pytest.raises(ArtefactError, match="dense_h_to_4h.weight.0.bin  has another content"):
        verify(repository, TrustArguments(signing_trusted=keys.public), FileDigests())


def test_a_signed_source_is_verified_before_anything_is_written(tmp_path: Path, keys: Keys) -> None:
    source = tmp_path / "source" / CHECKPOINT.name
    source.parent.mkdir()
    shutil.copyfile(CHECKPOINT, source)
    trusted = {"signing_trusted": keys.others_public, "signing_require": True}
    arguments = ConvertArguments(source, tmp_path / "1-gpu", weight_data_type="fp32", **trusted)
    with pytest.raises(ArtefactError, match="is not signed"):
        convert(arguments)
    signed = model_signing("sign", "key", source, "--signature", f"{source}.sig", "--private_key", keys.other)
    assert signed.returncode == 0, signed.stderr
    convert(arguments)
    damage(source)
    with pytest.raises(ArtefactError, match="has another content"):
        convert(ConvertArguments(source, tmp_path / "again", weight_data_type="fp32", **trusted))
    assert not (tmp_path / "again").exists()


def test_a_directory_that_anybody_signed_is_a_source(checkpoint: Path, keys: Keys, tmp_path: Path) -> None:
    source = tmp_path / "1-gpu"
    shutil.copytree(checkpoint, source, ignore=shutil.ignore_patterns("model.sig", "*.intoto.json", "bom.cdx.json"))
    signature = source / "model.sig"
    signed = model_signing("sign", "key", source, "--signature", signature, "--private_key", keys.other)
    assert signed.returncode == 0, signed.stderr
    trusted = {"signing_trusted": keys.others_public, "signing_require": True}
    convert(ConvertArguments(source, tmp_path / "again", weight_data_type="fp32", **trusted))
    damage(next(source.glob("*dense_h_to_4h.weight*")))
    with pytest.raises(ArtefactError, match="dense_h_to_4h.weight.0.bin  has another content"):
        convert(ConvertArguments(source, tmp_path / "third", weight_data_type="fp32", **trusted))
