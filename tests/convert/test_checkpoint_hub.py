"""Names of huggingface.co: the real client library against a stand-in for the hub here; the hub itself is not asked."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.shards.decoder_forward import forward
from support.tiny_models.huggingface_models import logits, save

from export_scripts.checkpoints.huggingface import hub as hub_files
from export_scripts.checkpoints.huggingface.hub import hub_name, is_fetched, local_directory
from handover.errors import ConfigError

ROOT = Path(__file__).parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
INPUT_IDS = np.array([[11, 3, 95, 0, 42, 17, 17, 8]])


class Hub:
    """What the client asks for: a repository's description, its tree of files, and a file."""

    def __init__(self, folder: Path) -> None:
        self.asked: list[str] = []
        self.damaged: tuple[str, ...] = ()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self.answer(with_body=False)

            def do_GET(self) -> None:
                self.answer(with_body=True)

            def answer(self, with_body: bool) -> None:
                hub.asked.append(self.path)
                status, content = hub.content(self.path, folder)
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
                self.send_header("X-Repo-Commit", COMMIT)
                if status == 404:
                    self.send_header("X-Error-Code", "RepoNotFound")
                self.end_headers()
                if with_body:
                    self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def content(self, path: str, folder: Path) -> tuple[int, bytes]:
        if not path.removeprefix("/api/models").startswith("/org/tiny"):
            return 404, b"{}"
        if path.startswith("/api/"):
            files = {str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*") if file.is_file()}
            if "/tree/" in path:
                tree = [{"type": "file", "path": name, "size": size, "oid": COMMIT} for name, size in files.items()]
                return 200, json.dumps(tree).encode()
            siblings = [{"rfilename": name, "size": files[name], **self.pointer(folder / name)} for name in files]
            return 200, json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": siblings}).encode()
        content = (folder / path.partition(f"/{COMMIT}/")[2]).read_bytes()
        return 200, content[:-1] + bytes([content[-1] ^ 1]) if path.endswith(self.damaged) else content

    def pointer(self, file: Path) -> dict[str, object]:
        """What the hub says of a large file: it keeps it by its digest."""
        if file.suffix != ".safetensors":
            return {}
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        return {"lfs": {"sha256": digest, "size": file.stat().st_size, "pointerSize": 130}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save("gpt2", tmp_path / "repository")
    (tmp_path / "repository/pytorch_model.bin").write_bytes(b"the same once more")
    (tmp_path / "repository/README.md").write_text("# Tiny")
    return tmp_path / "repository"


@pytest.fixture
def hub(folder: Path) -> Iterator[Hub]:
    hub = Hub(folder)
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


def convert(name: str, tmp_path: Path, endpoint: str) -> subprocess.CompletedProcess[str]:
    argv = [f"--checkpoint={tmp_path}/fetched", f"--output={tmp_path}/1-gpu", f"--hub-name={name}"]
    argv += ["--tensor-para-size=1", "--weight-data-type=fp32"]
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": f"{tmp_path}/home", "HF_HUB_DISABLE_XET": "1"}
    environment.pop("HF_HUB_OFFLINE", None)
    return subprocess.run(
        [sys.executable, "-m", "export_scripts.convert", *argv], cwd=ROOT, env=environment, capture_output=True,
        text=True, timeout=180,
    )  # fmt: skip


def test_a_name_is_fetched_once_and_converted(hub: Hub, folder: Path, tmp_path: Path) -> None:
    done = convert("org/tiny", tmp_path, hub.address)
    assert done.returncode == 0, done.stderr
    fetched = {path.name for path in (tmp_path / "fetched").iterdir() if path.is_file() and path.name[0] != "."}
    assert fetched == {"config.json", "generation_config.json", "model.safetensors", "vocab.json", "merges.txt"}
    assert f"fetching 5 files of org/tiny, commit {COMMIT}" in done.stderr
    assert is_fetched("org/tiny", tmp_path / "fetched")
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(folder)
    assert np.abs(forward(tmp_path / "1-gpu", INPUT_IDS) - logits(model, INPUT_IDS)).max() < 1e-4
    count = len(hub.asked)
    assert convert("org/tiny", tmp_path, "http://127.0.0.1:9").returncode == 0, "the network is not needed again"
    assert len(hub.asked) == count


def test_what_a_name_is_can_be_asked_before_it_is_fetched(hub: Hub, tmp_path: Path) -> None:
    for address, known in ((hub.address, "gpt2"), ("http://127.0.0.1:9", None)):
        program = f"{hub_files.__name__} import peek_config; print(peek_config('org/tiny').get('model_type'))"
        environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": f"{tmp_path}/home", "HF_HUB_DISABLE_XET": "1"}
        environment.pop("HF_HUB_OFFLINE", None)
        command = [sys.executable, "-c", f"from {program}"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180)
        assert done.stdout == f"{known}\n", done.stderr
    assert not [path for path in hub.asked if "safetensors" in path]


def test_a_plan_of_a_name_shows_no_requests(hub: Hub, tmp_path: Path) -> None:
    settings = ["dry_run=true", "stages=[convert]", "cluster_type=interactive", f"base_results_dir={tmp_path}/results"]
    settings += ["export.model.checkpoint_path=hf:org/tiny", f"data_dir={tmp_path}/data"]
    environment = {**os.environ, "HF_ENDPOINT": hub.address, "HF_HOME": f"{tmp_path}/home", "HF_HUB_DISABLE_XET": "1"}
    environment.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "main.py", *settings]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and hub.asked, done.stderr
    assert "--- convert" in done.stdout and "HTTP" not in done.stdout + done.stderr


@pytest.mark.parametrize("terminal", ["1", ""])
def test_progress_is_shown_on_a_terminal_only(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: str
) -> None:
    for name in ("TQDM_POSITION", "HF_HUB_DISABLE_PROGRESS_BARS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLIPWAY_TERMINAL", terminal)
    assert ("%|" in convert("org/tiny", tmp_path, hub.address).stderr) == bool(terminal)


def test_weights_that_are_not_the_hubs_are_refused(hub: Hub, tmp_path: Path) -> None:
    """A proxy or a disk changed a bit: the file's size tells nothing, its digest does."""
    hub.damaged = (".safetensors",)
    done = convert("org/tiny", tmp_path, hub.address)
    assert done.returncode == 1
    assert "model.safetensors is not what the hub has" in done.stderr
    assert not is_fetched("org/tiny", tmp_path / "fetched")
    (tmp_path / "fetched/model.safetensors").unlink()
    hub.damaged = ()
    assert convert("org/tiny", tmp_path, hub.address).returncode == 0


def test_an_unknown_name_is_one_clear_error(hub: Hub, tmp_path: Path) -> None:
    done = convert("org/other", tmp_path, hub.address)
    assert done.returncode != 0
    assert "hf:org/other cannot be fetched: RepositoryNotFoundError" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "1-gpu").exists()


def test_without_network_there_is_one_clear_error(tmp_path: Path) -> None:
    done = convert("org/tiny", tmp_path, "http://127.0.0.1:9")
    assert done.returncode != 0
    assert "hf:org/tiny cannot be fetched: Connect" in done.stderr
    assert "check name, network, HF_TOKEN and HF_ENDPOINT" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_repository_without_weights_that_are_read(hub: Hub, folder: Path, tmp_path: Path) -> None:
    for name in ("model.safetensors", "pytorch_model.bin"):
        (folder / name).unlink()
    done = convert("org/tiny", tmp_path, hub.address)
    assert "hf:org/tiny has neither safetensors nor pytorch_model.bin" in done.stderr


def test_names_and_paths() -> None:
    assert hub_name("hf:org/name@refs/pr/1") == "org/name@refs/pr/1"
    assert hub_name("hf:gpt2") == "gpt2"
    assert hub_name("org/name") is None
    assert hub_name("/data/gpt.nemo") is None
    assert local_directory("org/name@v1", Path("/data")) == Path("/data/huggingface/org--name--v1")
    for wrong in ("hf:", "hf:../up", "hf:a/b/c", "hf:/etc", "hf:org/na me"):
        with pytest.raises(ConfigError, match="is no name of huggingface"):
            hub_name(wrong)


def test_what_was_fetched_counts_as_there_only_when_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss of power may leave zeros in weights, which have no checksum of their own."""
    files = ["config.json", "model.safetensors"]
    info = SimpleNamespace(sha=COMMIT, siblings=[SimpleNamespace(rfilename=name, lfs=None) for name in files])
    library = SimpleNamespace(
        HfApi=lambda: SimpleNamespace(model_info=lambda *_, **__: info), snapshot_download=lambda *_, **__: None
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", library)
    states: list[bool] = []
    monkeypatch.setattr(hub_files, "sync_tree", lambda root: states.append(is_fetched("org/tiny", root)))
    hub_files.fetch("org/tiny", tmp_path, say=lambda line: None)
    assert states == [False] and is_fetched("org/tiny", tmp_path)
