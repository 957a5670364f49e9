"""What conf/ derives the names and places of a run from: OmegaConf resolvers."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from omegaconf import DictConfig

from ft_format.weight_format import KEY, find_format

_for_dry_runs: list[str] = []


def work_directory(project_dir: Path, scripts_path: str) -> str:
    """Directory below which data and results lie: the checkout; for an installed package the working directory.

    Args:
        project_dir: of this code.
        scripts_path: ``launcher_scripts_path``, which may name another checkout.
    """
    is_installed = (project_dir / "__init__.py").is_file() and Path(scripts_path) == project_dir
    return str(Path.cwd()) if is_installed else scripts_path


def find_training_dir(project_dir: Path, base_results_dir: str, model_train_name: str) -> str:
    """Directory of a training run: below the results, else one that ships in examples/.

    The first is returned where neither exists, so that the message names the usual place.
    """
    usual = Path(base_results_dir) / model_train_name
    shipped = project_dir / "examples" / model_train_name
    is_shipped = bool(model_train_name) and not (usual / "checkpoints").exists() and (shipped / "checkpoints").is_dir()
    return str(shipped if is_shipped else usual)


def name_variant(*, _root_: DictConfig) -> str:
    """What makes a served model another one and is not in its name yet: ``_int8_decoupled``; empty for the defaults.

    An engine that reads another form than FasterTransformer's shards is in it too: ``_vllm``.
    """
    triton, model = _root_.export.triton_deployment, _root_.export.model
    words = {
        find_format(triton[KEY]).name: triton[KEY],
        str(model.quantization): model.quantization,
        f"{triton.quantization}_at_load": triton.quantization,
        "decoupled": triton.decoupled,
        f"sessions{triton.interactive_sessions}": triton.interactive_sessions,
        "random": model.random_weights,
        str(_root_.deployment.engine): not _root_.deployment.engine.reads_shards,
    }
    return "".join(f"_{word}" for word, is_meant in words.items() if is_meant)


def sweep_directory(directory: str, dry_run: bool) -> str:
    """Where Hydra keeps a sweep's settings: for a dry run a temporary directory, see ``forget_dry_runs``."""
    if not dry_run:
        return directory
    _for_dry_runs.append(tempfile.mkdtemp(prefix="slipway-dry-run-"))
    return _for_dry_runs[-1]


def forget_dry_runs() -> None:
    """Remove the temporary directories, so that a dry run of a sweep leaves nothing."""
    while _for_dry_runs:
        shutil.rmtree(_for_dry_runs.pop(), ignore_errors=True)
