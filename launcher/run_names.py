"""What conf/ derives the names and places of a run from: OmegaConf resolvers."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig


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

    Args:
        _root_: the whole configuration, which OmegaConf passes under this name.
    """
    triton, model = _root_.export.triton_deployment, _root_.export.model
    words = {
        "int8": triton.int8_mode,
        "decoupled": triton.decoupled,
        f"sessions{triton.interactive_sessions}": triton.interactive_sessions,
        "random": model.random_weights,
    }
    return "".join(f"_{word}" for word, is_meant in words.items() if is_meant)
