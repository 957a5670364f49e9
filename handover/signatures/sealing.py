"""Finish what a stage has written: sign it, where a key is given, and write the manifest last."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from handover.durable import write_atomically
from handover.errors import ArtefactError
from handover.manifest import BILL, PROVENANCE, SIGNATURE, SIGNED_NAMES, Manifest
from handover.provenance import VERSION, made_by
from handover.signatures.arguments import SigningArguments
from handover.signatures.bill import bill_of_materials
from handover.signatures.hashed import DirectoryHashes, FileDigests
from handover.signatures.keys import open_key
from handover.signatures.library import sign_statement
from handover.signatures.trust import check_trusted, read_statement

STATEMENT_TYPE, PREDICATE_TYPE = "https://in-toto.io/Statement/v1", "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:slipway:{stage}:1"
_COMPUTING = ("numpy", "torch", "safetensors", "tokenizers", "sentencepiece", "model-signing")
"""Packages whose versions a provenance states, where they are installed."""


@dataclass
class Seal:
    """What finishes a directory.

    Attributes:
        given: the key and who is trusted.
        key: opened; None: nothing is signed.
        digests: of files that were read already.
    """

    given: SigningArguments
    key: Any = None
    digests: FileDigests = field(default_factory=FileDigests)

    @classmethod
    def open(cls, given: SigningArguments) -> Seal:
        """Open the key, and read who is trusted, before anything is written; ConfigError: one cannot be used."""
        key = open_key(given)
        if given.signing_trusted is not None:
            check_trusted(given.signing_trusted)
        return cls(given, key)

    def finish(
        self, stage: str, root: Path, manifest: Manifest, materials: Mapping[str, Path], figures: Any = ()
    ) -> None:
        """Sign a directory whose files are on the disk, then write its manifest.

        Args:
            stage: that has written it.
            root: the directory.
            manifest: of it.
            materials: files that it was made from, by the names that the provenance gives them.
            figures: that were measured, for the model card.
        """
        for name in SIGNED_NAMES:
            (root / name).unlink(missing_ok=True)  # of what was there before
        if self.key is not None:
            made_from = self.digests.of(materials)
            names = [record.path for record in manifest.files]
            made = self.digests.of({name: root / name for name in names})
            write_atomically(root / BILL, bill_of_materials(stage, manifest, made, made_from, figures))
            made |= self.digests.of({BILL: root / BILL})
            sign_statement(self.key, _provenance(stage, manifest, made, made_from), root / PROVENANCE)
            signed = [*names, BILL, PROVENANCE]
            self.key.set_hashing_config(DirectoryHashes(self.digests, signed))
            self.key.sign(root, root / SIGNATURE)
        manifest.write(root)

    def take_up(self, root: Path) -> None:
        """Take the digests that a stage before has signed, so that no large file is read for the signature again.

        A file that was changed since would be signed under the digest of what it was, and no verification passes.

        Raises:
            ArtefactError: signatures are required and it has none, or none of anybody who is trusted.
        """
        is_signed = (root / PROVENANCE).is_file()
        if self.given.signing_require and not is_signed:
            raise ArtefactError(
                f"{root} is not signed: it has no {PROVENANCE}, and signing.require=true",
                "convert again with signing.key: force=[convert]",
            )
        if self.key is None or self.given.signing_trusted is None or not is_signed:
            return
        for subject in read_statement(root / PROVENANCE, self.given.signing_trusted)["subject"]:
            if (path := root / subject["name"]).is_file():
                self.digests.know(path, subject["digest"]["sha256"])


def _provenance(
    stage: str, manifest: Manifest, made: Mapping[str, str], made_from: Mapping[str, str]
) -> dict[str, Any]:
    """Return the statement: which files were made from which, by which parameters and versions."""
    return {
        "_type": STATEMENT_TYPE,
        "subject": _described(made),
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE.format(stage=stage),
                "externalParameters": json.loads(json.dumps(manifest.made_from)),  # tuples are lists there
                "resolvedDependencies": _described(made_from),
            },
            "runDetails": {"builder": {"id": "urn:slipway", "version": _versions()}},
        },
    }


def _described(digests: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"name": name, "digest": {"sha256": digest}} for name, digest in sorted(digests.items())]


def _versions() -> dict[str, str]:
    """Return the versions of the code and of what computes in it."""
    from importlib import metadata  # a twentieth of the time in which a conversion starts

    code = {f"slipway-{name}": value for name, value in made_by().items() if name in ("commit", "code") and value}
    found = {"slipway": VERSION, **code, "python": platform.python_version()}
    for name in _COMPUTING:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
