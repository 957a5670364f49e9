"""The layers stay apart: what runs on compute nodes never imports the launcher, Hydra or submitit."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
STDLIB = set(sys.stdlib_module_names)
OURS = {"models", "ft_format", "handover", "launcher", "export_scripts", "deployment", "evaluation"}

ALLOWED = {
    "models": {"models"},
    "ft_format": {"models", "ft_format"},
    "ft_format/socket_messages.py": {"numpy"},  # of two processes that both have it
    "handover": {"models", "ft_format", "handover", "isal"},
    "launcher": {
        *("models", "ft_format", "handover", "launcher", "export_scripts", "deployment", "evaluation"),
        *("hydra", "omegaconf", "submitit", "yaml"),
    },
    "export_scripts": {
        *("models", "ft_format", "handover", "export_scripts", "numpy", "torch", "yaml", "tokenizers", "sentencepiece"),
        *("tritonclient", "google", "triton_python_backend_utils"),
    },
    "deployment": {
        *(
            "models",
            "ft_format",
            "handover",
            "deployment",
            "export_scripts",
            "backends",
            "numpy",
            "tritonclient",
            "google",
        ),
    },
    "deployment/openai": {
        *("models", "ft_format", "handover", "deployment", "export_scripts", "backends", "numpy", "tritonclient"),
        *("aiohttp", "brotli", "grpc", "jinja2", "tokenizers"),
    },
    "deployment/guard": {"handover", "deployment", "tritonclient", "google"},  # before strangers: little code of others
    "evaluation": {
        *(
            "models",
            "ft_format",
            "handover",
            "evaluation",
            "numpy",
            "pandas",
            "matplotlib",
            "rich",
            "tritonclient",
            "tokenizers",
        ),
        *("sentencepiece", "grpc", "yaml", "sacrebleu", "lm_eval", "nltk", "pynvml", "psutil"),
        *("jinja2", "aiohttp"),
    },
    "evaluation/client": {
        *(
            "models",
            "ft_format",
            "handover",
            "evaluation",
            "numpy",
            "tritonclient",
            "tokenizers",
            "sentencepiece",
            "grpc",
        ),
        "export_scripts",  # the exported repository's own tokenizer, so that a text has one division into tokens
    },
    "evaluation/parity": {
        *("models", "ft_format", "handover", "evaluation", "export_scripts", "backends"),
        *("numpy", "torch", "transformers", "yaml"),
    },
    "evaluation/divergence": {
        *("models", "ft_format", "handover", "evaluation", "export_scripts", "backends"),
        *("numpy", "torch"),
    },
    "evaluation/monitor": {"handover", "evaluation", "export_scripts", "backends", "numpy"},
    "backends/fastertransformer": {
        "models",
        "ft_format",
        "numpy",
        "torch",
        "triton",
        "fastertransformer",
        "triton_python_backend_utils",
        *("llguidance", "sentencepiece"),  # imported when a request has a grammar
    },
}
ROOMS_OF_EVALUATION = {
    "client": {"client"},
    "speed": {"client", "speed"},
    "tasks": {"client", "speed", "tasks"},
    "report": {"speed", "tasks", "report"},
    "trackers": {"report", "trackers"},
    "parity": {"client", "speed", "tasks", "parity"},
    "divergence": {"client", "speed", "tasks", "parity", "divergence"},
    "monitor": {"client", "tasks", "parity", "divergence", "monitor"},
}
# What lies below a package, from the ground up: each imports what stands before it, and nothing after it.
FLOORS = {
    "backends.fastertransformer.engine": [
        *("errors", "arrays", "large_pages", "settings"),
        *("cache", "ops", "parallel", "model", "request", "grammar", "rows", "steps", "sampling", "scheduling"),
        *("compiling", "part", "loading", "engine"),
    ],
    "export_scripts": [
        *("arguments", "tensors", "quantization", "weights", "checkpoints", "conversion", "targets", "repository"),
        *("convert", "export", "export_vllm", "inspect"),
    ],
    "export_scripts.conversion": ["move", "write", "plan", "job"],
    "deployment": [
        *("arguments", "processes", "doors", "life", "proof", "guard", "openai", "beside", "triton", "ranks"),
        *("engines", "replicas", "gemm_autotune", "serve"),
    ],
    "deployment.openai": [
        *("arguments", "errors", "values", "tools", "bodies", "texts", "engine", "models", "adapters", "turns"),
        *("sample_log", "conversations", "service", "answers", "agents", "listening", "__main__"),
    ],
}
# What a model repository carries is imported below it too, and imports nothing of the project.
CARRIED = {("export_scripts.checkpoints.tokenizers.chat", "repository")}
FLOORS_OF_LAUNCHER = ("config", "clusters", "plan", "run", "submit")
LAUNCHER_STDLIB_ONLY = [
    "plan/plan",
    "runner",
    *(f"run/{file.stem}" for file in sorted((PROJECT / "launcher" / "run").glob("*.py"))),
]


def imported_packages(file: Path, top_level_only: bool = False) -> set[str]:
    """Names of the packages that a file imports; its own relative imports left out."""
    tree = ast.parse(file.read_text())
    nodes = tree.body if top_level_only else ast.walk(tree)
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module)
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_a_package_imports_only_what_its_layer_may(package: str) -> None:
    place = PROJECT / package
    files = [file for file in (place, *place.rglob("*.py")) if file.is_file() and "tokenizer_models" not in file.parts]
    # What has a row of its own: parity computes with torch, the OpenAI endpoint serves with aiohttp.
    inner = [PROJECT / name for name in ALLOWED if name.startswith(f"{package}/")]
    files = [file for file in files if not set(inner) & {file, *file.parents}]
    assert files
    foreign = {
        f"{file.relative_to(PROJECT)}: {name}"
        for file in files
        for name in imported_packages(file) - STDLIB - ALLOWED[package]
    }
    assert not foreign


def imported_rooms(file: Path) -> set[str]:
    """What a file imports from evaluation: names of rooms and of commands; all may import the commands' arguments."""
    imports = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]
    names: set[str] = set()
    for node in imports:
        origin = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        names |= {f"{origin}{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("evaluation.")} - {"arguments"}


def test_every_room_of_evaluation_is_listed() -> None:
    assert {file.parent.name for file in (PROJECT / "evaluation").glob("*/__init__.py")} == set(ROOMS_OF_EVALUATION)


@pytest.mark.parametrize("room", sorted(ROOMS_OF_EVALUATION))
def test_a_room_of_evaluation_imports_no_room_above_it_and_no_command(room: str) -> None:
    found = {file.name: imported_rooms(file) for file in (PROJECT / "evaluation" / room).rglob("*.py")}
    assert any(found.values())
    above = {name: rooms - ROOMS_OF_EVALUATION[room] for name, rooms in found.items()}
    assert not {name: rooms for name, rooms in above.items() if rooms}


def imported_modules(name: str, modules: dict[str, Path]) -> set[str]:
    """Those of the modules that one of them imports, within functions and for type checkers too."""
    is_package, found = modules[name].name == "__init__.py", set[str]()
    for node in ast.walk(ast.parse(modules[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            around = name.split(".")[: len(name.split(".")) - node.level + is_package] if node.level else []
            origin = ".".join([*around, *([node.module] if node.module else [])])
            found |= {each if (each := f"{origin}.{alias.name}") in modules else origin for alias in node.names}
    return found & (modules.keys() - {name})


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """What each module of the product imports of it."""
    packages = sorted({name.split("/")[0] for name in ALLOWED})
    files = [file for package in packages for file in (PROJECT / package).rglob("*.py")]
    dotted = {file: ".".join(file.relative_to(PROJECT).with_suffix("").parts) for file in files}
    modules = {name.removesuffix(".__init__"): file for file, name in dotted.items()}
    return {name: imported_modules(name, modules) for name in modules}


def test_no_files_import_each_other_in_a_circle(imports: dict[str, set[str]]) -> None:
    assert sum(map(len, imports.values())) > len(imports)
    rest = {name: set(imported) for name, imported in imports.items()}
    while rest:
        imported_by_others = set().union(*rest.values())
        left = {name: to & rest.keys() for name, to in rest.items() if name in imported_by_others and to & rest.keys()}
        assert left != rest, f"on circles, or between them: {rest}"
        rest = left


@pytest.mark.parametrize("package", FLOORS)
def test_a_floor_imports_none_above_it(package: str, imports: dict[str, set[str]]) -> None:
    def floors(names: Iterable[str]) -> set[str]:
        return {name.removeprefix(f"{package}.").split(".")[0] for name in names if name.startswith(f"{package}.")}

    height = {floor: index for index, floor in enumerate(FLOORS[package])}
    assert floors(imports) == set(height)
    above = {
        (name, floor)
        for name, imported in imports.items()
        for own in floors({name})
        for floor in floors(imported)
        if height[floor] > height[own]
    } - CARRIED
    assert not above


@pytest.mark.parametrize("floor", FLOORS_OF_LAUNCHER)
def test_a_floor_of_the_launcher_imports_no_floor_above_it(floor: str) -> None:
    below = {*FLOORS_OF_LAUNCHER[: FLOORS_OF_LAUNCHER.index(floor) + 1], *(["runner"] if floor == "submit" else [])}
    names = {
        (file.name, node.module.split(".")[1] if node.module.count(".") else node.names[0].name)
        for file in (PROJECT / "launcher" / floor).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "launcher"
    }
    assert names and not {(file, name) for file, name in names if name not in below}


@pytest.mark.parametrize("module", LAUNCHER_STDLIB_ONLY)
def test_what_job_hosts_run_needs_only_the_standard_library(module: str) -> None:
    imported = imported_packages(PROJECT / "launcher" / f"{module}.py", top_level_only=True)
    assert imported <= STDLIB | {"handover", "launcher"}


def test_the_login_side_imports_no_heavy_library() -> None:
    heavy = ["torch", "numpy", "pandas", "matplotlib", "tritonclient", "transformers"]
    code = f"import main, sys; print([name for name in {heavy!r} if name in sys.modules])"
    listed = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=True)
    assert listed.stdout.strip() == "[]"


def test_the_runner_starts_without_hydra() -> None:
    code = "import launcher.runner, sys; print([n for n in ('hydra', 'omegaconf', 'submitit') if n in sys.modules])"
    listed = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=True)
    assert listed.stdout.strip() == "[]"
