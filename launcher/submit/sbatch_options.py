"""Options of sbatch that ``cluster.additional_parameters`` may not have."""

from __future__ import annotations

from collections.abc import Mapping

from handover.errors import ConfigError

_OTHER_CLUSTER = (
    "status, cancel and the jobs that wait for one another ask the cluster of this host alone: submit there"
)
_WHERE = "a run's output files are found by their names: choose base_results_dir"
_NO_ID = "without the job's id nothing can wait for it"
_REFUSED = {
    **dict.fromkeys(("clusters", "cluster", "M"), _OTHER_CLUSTER),
    **dict.fromkeys(
        ("array", "a"), "each job of an array would run the same stages into the same results; leave it out"
    ),
    **dict.fromkeys(("dependency", "d"), "the jobs of a run wait for one another by it: take export.run.dependency"),
    **dict.fromkeys(("wait", "W"), "main.py returns once the jobs are submitted: look with python -m launcher status"),
    **dict.fromkeys(("output", "error", "o", "e", "open-mode"), _WHERE),
    **dict.fromkeys(("parsable", "quiet", "Q", "test-only", "help", "usage", "version", "h", "V"), _NO_ID),
    "wrap": "the command of a job is its stages",
}
"""Options of sbatch that jobs of a run cannot have, and why."""


def check_options(options: Mapping[str, object]) -> None:
    """Refuse options of ``cluster.additional_parameters`` that would lose a job or run it several times.

    Raises:
        ConfigError: naming the option, also where it is written short as sbatch takes it, and why.
    """
    for name in options:
        written = name.replace("_", "-")
        meant = next(
            (option for option in (written, *_REFUSED) if option in _REFUSED and option.startswith(written)), None
        )
        if meant is not None:
            shown = name if written == meant else f"{name} ({meant})"
            raise ConfigError(f"cluster.additional_parameters: a run's jobs cannot have {shown}", _REFUSED[meant])
