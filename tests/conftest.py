"""Options and rules of the whole suite."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import sys
from collections.abc import Iterator
from functools import lru_cache
from inspect import signature
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any

import pytest

pytest.register_assert_rewrite("support")  # its asserts say what differs, as those of the tests do

ALLOWED_SKIPS = ("no GPU",)
# Folders whose tests share a cluster, the stages' results or a server.
TOGETHER = {"slurm", "torture", "decoupled_gpt", "t5", "llama_tools"}
# Folders that take longest come first, so that no process is left with one of them while the others have nothing to do.
FIRST = [
    *("slurm", "torture", "decoupled_gpt", "t5", "llama_tools", "integration", "bcp", "engine", "benchmarks", "convert")
]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-golden", action="store_true", help="write golden files instead of comparing them")
    parser.addoption(
        "--campaign", choices=("small", "hour", "full"), default="small", help="how much tests/torture tries"
    )


# Collecting tests makes some 600,000 objects that stay. Looking through them for garbage takes a fifth of that time,
# and a twentieth of the tests' own.
_GARBAGE = gc.get_threshold()
gc.set_threshold(50_000, 20, 100)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GARBAGE)


def pytest_sessionstart() -> None:
    """Let programs under test be as their users have them, wherever the suite runs.

    Ctrl-C reaches them: in the background of a script it is ignored, and they inherit that. A process of several has
    the width of a terminal that is not its own.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ.pop("COLUMNS", None)
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # of what they start: see one_thread_of_torch
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def servers_end_in_good_order() -> Iterator[None]:
    """Look at last at the ends of servers whose tests were over before."""
    yield
    if "support.servers.served" in sys.modules:
        sys.modules["support.servers.served"].assert_all_stopped()


@pytest.fixture(scope="session", autouse=True)
def settings_are_parsed_once() -> Iterator[None]:
    """Let OmegaConf parse a file of settings and an interpolation once: hundreds of compositions begin by the same."""
    if "omegaconf" not in sys.modules:
        yield
        return
    from omegaconf import _utils, base, grammar_parser, omegaconf

    yaml, parsed = vars(omegaconf)["yaml"], dict[str, Any]()

    def load(stream: Any, **given: Any) -> Any:
        text = stream.read()
        if text not in parsed:
            stream.seek(0)
            parsed[text] = yaml.load(stream, **given)
        return parsed[text]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(omegaconf, "yaml", SimpleNamespace(**vars(yaml) | {"load": load}))
        parse = lru_cache(10_000)(grammar_parser.parse)
        for module in (base, _utils):
            patched.setattr(module, "parse", parse)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """Sync nothing in this process: what is synced, and when, is what tests/torture/test_power_loss.py is about."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def unfreezing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each engine that is closed look for garbage among all objects, as it does outside of this suite."""
    monkeypatch.setattr(gc, "unfreeze", _unfreeze)


_unfreeze, _AT_ONCE = gc.unfreeze, 20


@pytest.fixture(scope="session", autouse=True)
def garbage_of_several_engines_at_once() -> Iterator[None]:
    """Look for the garbage of twenty closed engines at once: among what the suite imports it takes half a second."""
    closed = itertools.count(1)

    def unfreeze() -> None:
        if next(closed) % _AT_ONCE == 0:
            _unfreeze()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gc, "unfreeze", unfreeze)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_thread_of_torch() -> None:
    """Let torch compute with one thread in this process: those of several processes only wait for one another."""
    if "PYTEST_XDIST_WORKER" in os.environ and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Never share out what belongs together; xdist's own --dist=loadgroup shares out every test with pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling  # not in every virtual environment of the tests

    config.option.loadscopereorder = False  # or what has most tests would come first, whatever FIRST says
    scheduling = LoadScopeScheduling(config, log)
    scheduling._split_scope = together  # what its own subclasses replace
    return scheduling


def together(nodeid: str) -> str:
    """Name what one worker runs in order: a file or a folder, whose fixtures are shared."""
    file = PurePath(nodeid.partition("::")[0])
    return str(file.parent if file.parent.name in TOGETHER else file)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("in_ci"):
            parameters: Any = vars(item)["callspec"].params
            if not mark.kwargs["when"](SimpleNamespace(**parameters)):
                item.add_marker(pytest.mark.long)
    items.sort(key=lambda item: FIRST.index(item.path.parent.name) if item.path.parent.name in FIRST else len(FIRST))


@pytest.hookimpl(tryfirst=True)  # in place of pytest's own call
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run tests that compare times of the clock as ``support.measurements.calm`` says."""
    if pyfuncitem.get_closest_marker("clock") is None:
        return None
    from support.measurements.calm import run_while_calm  # after its asserts were registered

    given = signature(pyfuncitem.obj).parameters
    run_while_calm(pyfuncitem.obj, {name: pyfuncitem.funcargs[name] for name in given})
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name every skip; any but a missing GPU fails the run (see pytest_sessionfinish)."""
    for reason in _skip_reasons(terminalreporter):
        terminalreporter.write_line(f"skipped: {reason}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A test that is skipped for anything but a missing GPU is a failure."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter and any(not allowed(reason) for reason in _skip_reasons(reporter)) and exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def allowed(reason: str) -> bool:
    return any(text in reason for text in ALLOWED_SKIPS)


def _skip_reasons(reporter: pytest.TerminalReporter) -> list[str]:
    skipped = reporter.stats.get("skipped", [])
    return [
        str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr) for report in skipped
    ]
