"""What the marker ``clock`` does: a test is run again only where it fails while the process was kept from running."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.measurements.calm import STALL_S, TRIES, Stalls, run_while_calm


@pytest.mark.clock
def test_what_fails_in_a_stall_is_run_again_in_a_folder_of_its_own(tmp_path: Path) -> None:
    """It is marked itself: whoever writes the marker wrongly runs nothing again."""
    folders = list(tmp_path.parent.glob("**/first"))
    (tmp_path / "first").touch()
    if not folders:
        _hold_the_interpreter()
        raise AssertionError("only the first time")


def test_what_fails_on_a_calm_machine_fails_at_once_and_in_stalls_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []

    def fails() -> None:
        runs.append(0)
        raise AssertionError("always")

    for stall_s, expected in ((0.0, 1), (STALL_S, TRIES)):
        monkeypatch.setattr(Stalls, "_watch", lambda self, stall_s=stall_s: setattr(self, "longest_s", stall_s))
        runs.clear()
        with pytest.raises(AssertionError, match="always"):
            run_while_calm(fails, {})
        assert len(runs) == expected


def test_a_stall_is_seen() -> None:
    stalls = Stalls()
    with stalls.watched():
        _hold_the_interpreter()
    assert stalls.longest_s >= STALL_S


def _hold_the_interpreter() -> None:
    """Keep every other thread of this process from running, as a busy machine does."""
    bytes_ = bytearray(1 << 24)
    began_s = time.monotonic()
    while time.monotonic() - began_s < 5 * STALL_S:
        sum(bytes_)  # one call of C that does not let go
