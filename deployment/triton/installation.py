"""The tritonserver binary: where it is, whether its Python stub can run, how it is started."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deployment.arguments import ServeArguments
from deployment.doors.doors import Doors
from deployment.doors.restriction import known_flags
from handover.errors import ServerError, nearest

SLIPWAY, FASTERTRANSFORMER = "slipway", "fastertransformer"
_PROJECT = Path(__file__).resolve().parents[2]
_ENGINE_SOURCE = _PROJECT / "backends" / "fastertransformer"
_FACTS = tuple(_PROJECT / name for name in ("models", "ft_format"))  # that the engine imports
_CONTAINER_BINARY = Path("/opt/tritonserver/bin/tritonserver")
_STUB = "triton_python_backend_stub"
_LOADER_FAILED = 127
"""Exit status of ld.so when a library is missing."""


@dataclass(frozen=True)
class Installation:
    """A tritonserver that can be started.

    Attributes:
        binary: the server.
        python_backend: directory of libtriton_python.so; None: the server uses its own backends.
        stub: the stub program for this interpreter's Python version; None with the server's own backends.
        environment: variables that server and stub need.
    """

    binary: Path
    python_backend: Path | None
    stub: Path | None
    environment: Mapping[str, str]


def locate(engine: str, given: Path | None = None) -> Installation:
    """Find the server for an engine and make sure that its stub can load.

    ``slipway`` is served by nvidia-pytriton's server, with a backend directory of our own;
    ``fastertransformer`` by the container's server with the container's own backend.

    Args:
        engine: slipway or fastertransformer.
        given: another tritonserver to take, with the backends that lie beside it; None: that of the engine.

    Raises:
        ServerError: nothing is installed, or the stub misses a library. Left unchecked, a stub that
            cannot load makes the server wait for ever without opening a port.
    """
    if engine not in (SLIPWAY, FASTERTRANSFORMER):
        raise ServerError(f"unknown engine '{engine}'", nearest(engine, (SLIPWAY, FASTERTRANSFORMER)))
    if given is not None:
        _check_binary(given)
    if engine == FASTERTRANSFORMER:
        found = given or (_CONTAINER_BINARY if _CONTAINER_BINARY.is_file() else shutil.which("tritonserver"))
        if not found:
            raise ServerError(
                "there is no tritonserver: neither /opt/tritonserver nor on PATH",
                "engine=fastertransformer runs in the inference container; set container, or deployment.engine=slipway",
            )
        return Installation(Path(found), None, None, {})
    root = given.absolute().parents[1] if given is not None else _pytriton_root()
    stub = _find_stub(root)
    binary = given.absolute() if given is not None else root / "bin" / "tritonserver"
    return Installation(binary, root / "backends" / "python", stub, _stub_environment(stub, os.environ))


def _check_binary(given: Path) -> None:
    """Refuse what is no tritonserver that starts here."""
    hint = "deployment.tritonserver is the path of the program, such as /opt/tritonserver/bin/tritonserver"
    if not given.is_file() or not os.access(given, os.X_OK):
        raise ServerError(f"deployment.tritonserver: {given} is no program", hint)
    if not {"model-repository", "http-address", "grpc-port"} <= known_flags(given, {}):
        raise ServerError(f"deployment.tritonserver: {given} --help does not name Triton's flags", hint)


def _find_stub(root: Path) -> Path:
    """Find the stub for this Python: nvidia-pytriton has one for each version, other servers have one for theirs."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stubs, own = root / "python_backend_stubs", root / "backends" / "python" / _STUB
    if (stub := stubs / version / _STUB).is_file():
        return stub
    if stubs.is_dir():
        have = ", ".join(sorted(path.name for path in stubs.iterdir()))
        raise ServerError(f"nvidia-pytriton has no stub for Python {version}", f"it has stubs for {have}")
    if not own.is_file() or not own.with_name("libtriton_python.so").is_file():
        raise ServerError(
            f"there is no Python backend at {own.parent}, which the drop-in engine runs in",
            "deployment.tritonserver must have backends/python beside its bin",
        )
    built_for = re.search(rb"libpython(3\.\d+)", own.read_bytes())
    if built_for is None or built_for[1].decode() != version:
        has = built_for[1].decode() if built_for else "another Python"
        raise ServerError(
            f"{own} is built for Python {has}, and this one is {version}", "build that stub for this Python"
        )
    return own


def _pytriton_root() -> Path:
    # find_spec does not import: pytriton's import takes seconds and installs signal handlers.
    spec = importlib.util.find_spec("pytriton")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        root = Path(location) / "tritonserver"
        if (root / "bin" / "tritonserver").is_file():
            return root
    raise ServerError("nvidia-pytriton is not installed: it carries tritonserver", "run: make install")


def _stub_environment(stub: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables under which the stub loads: the venv's Python first on PATH, libpython where it is."""
    own_bin = str(Path(sys.executable).parent)  # not resolved: the venv's, whose packages the stub shall see
    wanted = {"PATH": os.pathsep.join((own_bin, environment.get("PATH", os.defpath)))}
    # The interpreter's own libpython goes first, if it has one: with another one of the same version, a distribution's
    # 3.11.2 beside a 3.11.7, the stub starts and then cannot import ssl.
    name = str(sysconfig.get_config_var("INSTSONAME"))
    directories = (str(sysconfig.get_config_var("LIBDIR")), f"{sys.base_prefix}/lib")
    if own := [each for each in directories if (Path(each) / name).is_file()]:
        wanted["LD_LIBRARY_PATH"] = os.pathsep.join((own[0], *filter(None, [environment.get("LD_LIBRARY_PATH")])))
    if missing := _missing_libraries(stub, {**environment, **wanted}):
        name = f"libpython{sys.version_info.major}.{sys.version_info.minor}"
        raise ServerError(
            f"Triton's Python stub cannot start: {missing}",
            f"install the shared library of this Python (Debian and Ubuntu: apt-get install {name}), "
            "or use an interpreter that was built with --enable-shared",
        )
    return wanted


def _missing_libraries(stub: Path, environment: Mapping[str, str]) -> str:
    """Run the stub without arguments; return the loader's complaint, or nothing if it got as far as main()."""
    try:
        ended = subprocess.run([stub], env=environment, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return ended.stderr.strip() if ended.returncode == _LOADER_FAILED else ""


def assemble_backends(installation: Installation, directory: Path, engine_source: Path = _ENGINE_SOURCE) -> Path | None:
    """Lay out a backend directory with the Python backend, our engine and the packages that it imports.

    Args:
        installation: where the parts come from.
        directory: private; the layout is made below it.
        engine_source: directory of the engine's ``model.py``.

    Returns:
        Path for ``--backend-directory``; None where the server uses its own backends.
    """
    if installation.python_backend is None or installation.stub is None:
        return None
    if not (engine_source / "model.py").is_file():
        raise ServerError(f"{engine_source} has no model.py: the engine is missing from this checkout")
    root = directory / "backends"
    python = root / "python"
    python.mkdir(parents=True)
    # The library must be a copy: Triton refuses a link that leads out of the backend directory. The stub
    # must be a link: it finds the libraries it was shipped with relative to its real place.
    shutil.copyfile(installation.python_backend / "libtriton_python.so", python / "libtriton_python.so")
    (python / "triton_python_backend_utils.py").symlink_to(
        installation.python_backend / "triton_python_backend_utils.py"
    )
    (python / _STUB).symlink_to(installation.stub)
    for source, name in ((engine_source, FASTERTRANSFORMER), *((source, source.name) for source in _FACTS)):
        shutil.copytree(source, root / name, ignore=_left_out)
    return root


def _left_out(directory: str, names: list[str]) -> set[str]:
    """Leave out what other interpreters compiled, and what one is writing: its own spares each start 200 modules."""
    whole = f".{sys.implementation.cache_tag}.pyc"
    return {name for name in names if os.path.basename(directory) == "__pycache__" and not name.endswith(whole)}


def link_repository(repository: Path, directory: Path, is_watched: bool = False) -> Path:
    """Link the repository at a path of plain letters, below which nothing of the published one is written.

    Triton starts a stub through ``bash -c`` with the model's path unquoted in it: a space there breaks
    the command, and ``; touch x`` in a results directory would be run. The stub reads no variables of Python's, so
    that nothing keeps it from putting ``__pycache__`` beside the model that it imports: that goes beside the link.

    Args:
        repository: under whatever name.
        directory: private; the links are made below it.
        is_watched: models come and go while it is served, so that only the whole can be linked.
    """
    link = directory / "repository"
    if is_watched:
        link.symlink_to(repository.absolute(), target_is_directory=True)
        return link
    link.mkdir()
    for entry in repository.absolute().iterdir():
        if any(entry.glob("*/model.py")):
            _link_files(entry, link / entry.name)
        else:
            (link / entry.name).symlink_to(entry, target_is_directory=entry.is_dir())
    return link


def _link_files(source: Path, target: Path) -> None:
    """Make the same tree of directories, with links to the files in them."""
    target.mkdir()
    for entry in source.iterdir():
        if not entry.is_dir():
            (target / entry.name).symlink_to(entry)
        elif entry.name != "__pycache__":
            _link_files(entry, target / entry.name)


def build_argv(
    binary: Path,
    arguments: ServeArguments,
    repository: Path,
    doors: Doors,
    prefix: str,
    backends: Path | None,
    more: Sequence[str] = (),
) -> tuple[str, ...]:
    """Build the server's command line; pure.

    Every address is given: Triton's default is all interfaces. ``shm-region-prefix-name`` makes the
    shared-memory regions of this server's stubs, and the stubs themselves, tell whose they are.

    Args:
        binary: tritonserver.
        arguments: of the deployment.
        repository: as made by ``link_repository``.
        doors: to listen on.
        prefix: unique prefix of shared-memory regions.
        backends: our backend directory; None: the server's own.
        more: flags of ours; a person's own come after them.
    """
    own = (f"--backend-directory={backends}", "--allow-gpu-metrics=false") if backends else ()
    return (
        str(binary),
        f"--model-repository={repository}",
        *own,
        f"--http-address={doors.host}",
        f"--http-port={doors.ports.http}",
        f"--grpc-address={doors.host}",
        f"--grpc-port={doors.ports.grpc}",
        f"--metrics-address={doors.host}",
        f"--metrics-port={doors.ports.metrics}",
        "--disable-auto-complete-config",
        f"--exit-timeout-secs={max(0, round(arguments.exit_timeout_s))}",
        f"--backend-config=python,shm-region-prefix-name={prefix}",
        *more,
        *arguments.server_args,
    )
