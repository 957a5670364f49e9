"""These tests need model-signing, in-toto and CycloneDX: ``make test-signing`` installs them beside the others."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from support.runs.signing_keys import Keys, make_keys

collect_ignore_glob = [] if find_spec("model_signing") else ["test_*.py"]


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return make_keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test asks Sigstore's services: what a network would be needed for fails."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
