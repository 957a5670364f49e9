"""A deployment that is asked to end hears it, whatever it is doing at that moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

ASKED_AGAIN_AND_AGAIN = """
import os, signal
from deployment.life.stop_request import StopRequest
with StopRequest().listening() as first:
    print("listening", flush=True)
    for _ in range(2_000):
        with StopRequest().listening() as stop:
            while not stop.came(0.0001):
                pass
    print(first.reason or stop.reason, flush=True)
    os._exit(0)
"""


def test_a_signal_is_heard_at_any_moment_of_the_waiting() -> None:
    """A lock that a handler shares with the code that it interrupts holds both for ever, once in some hundred times."""
    with subprocess.Popen([sys.executable, "-c", ASKED_AGAIN_AND_AGAIN], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "listening\n"
            deadline = time.monotonic() + 240
            while process.poll() is None and time.monotonic() < deadline:
                os.kill(process.pid, signal.SIGTERM)
                time.sleep(0.0005)
            assert process.poll() == 0, "it waits for a lock that it holds itself"
            assert process.stdout.read() == "SIGTERM\n"
        finally:
            process.kill()
