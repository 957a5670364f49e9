"""What doctor says of a host with GPUs; nvidia-smi is a stand-in, the compiler is the host's."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from launcher import doctor


def fake_nvidia_smi(directory: Path, driver: str) -> None:
    program = directory / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncase $1 in -L) echo 'GPU 0: stand-in';; topo) ;; *) echo {driver};; esac\n")
    program.chmod(0o755)


@pytest.mark.parametrize(("driver", "state"), [("580.159.04", "ok"), ("570.86.10", "bad"), ("N/A", "bad")])
def test_a_driver_that_is_too_old_is_named(
    driver: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvidia_smi(tmp_path, driver)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = doctor.check_driver()
    assert (found.state, found.text) == (state, driver)
    assert state == "ok" or "580 or newer" in found.mend


def test_a_host_with_gpus_and_no_working_compiler_is_told_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CC", raising=False)
    assert shutil.which("gcc") and doctor.check_compiler().state == "ok"
    fake_nvidia_smi(tmp_path, "580.1")
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "sh").symlink_to("/bin/sh")
    found = {finding.check: finding for finding in doctor.examine(tmp_path)}
    assert found["compiler"].state == "bad" and "apt-get install gcc" in found["compiler"].mend
    broken = tmp_path / "gcc"
    broken.write_text("#!/bin/sh\necho 'cannot find -lc' >&2\nexit 1\n")
    broken.chmod(0o755)
    found_broken = doctor.check_compiler()
    assert found_broken.state == "bad" and "cannot find -lc" in found_broken.text
