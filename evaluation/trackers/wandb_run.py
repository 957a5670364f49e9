"""Tell a run to Weights & Biases; WANDB_API_KEY, WANDB_BASE_URL and WANDB_ENTITY are those of the environment."""

from __future__ import annotations

from pathlib import Path

from evaluation.trackers.tracked import Tracked, load
from handover.errors import ServerError


def track(run: Tracked, mode: str, directory: Path) -> str:
    """Log figures, facts and files under an id that the same figures have again.

    Args:
        run: what is told.
        mode: online, or offline: into files that ``wandb sync`` sends.
        directory: where the library keeps its files.

    Returns:
        Where they are.

    Raises:
        ConfigError: the library is not installed.
        ServerError: it cannot log in, or reaches no server.
    """
    wandb = load("wandb", "evaluation.tracking.wandb", "wandb")
    directory.mkdir(parents=True, exist_ok=True)
    try:
        made = wandb.init(
            project=run.experiment,
            name=run.title,
            id=run.identity,
            resume="allow" if mode == "online" else None,
            mode=mode,
            dir=str(directory),
            config=dict(run.facts),
            settings=wandb.Settings(silent=True, console="off"),
        )
        made.summary.update(dict(run.figures))
        for path in run.files:
            made.save(str(path), base_path=str(path.parent), policy="now")
        place = made.url or str(Path(made.dir).parent)
        made.finish()
    except Exception as error:  # wandb has its own, and those of its service
        raise ServerError(f"evaluation.tracking.wandb: the figures are not taken: {error}") from error
    return place
