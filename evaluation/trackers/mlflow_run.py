"""Tell a run to MLflow; its tokens are those of the environment, such as MLFLOW_TRACKING_TOKEN."""

from __future__ import annotations

from evaluation.trackers.tracked import Tracked, load
from handover.errors import ServerError

_IDENTITY = "slipway.identity"


def track(run: Tracked, uri: str) -> str:
    """Log figures, facts and files; a run that has them already is left as it is.

    Args:
        run: what is told.
        uri: MLflow's tracking URI: a server, a database, or a directory (file:...).

    Returns:
        Where they are.

    Raises:
        ConfigError: the library is not installed.
        ServerError: MLflow does not take them.
    """
    mlflow = load("mlflow", "evaluation.tracking.mlflow", "mlflow")
    try:
        client = mlflow.MlflowClient(uri)
        found = client.get_experiment_by_name(run.experiment)
        experiment = found.experiment_id if found else client.create_experiment(run.experiment)
        same = f"tags.`{_IDENTITY}` = '{run.identity}' and attributes.status = 'FINISHED'"
        if known := client.search_runs([experiment], same):
            return f"{uri}, run {known[0].info.run_id}, as it was"
        made = client.create_run(experiment, run_name=run.title, tags={_IDENTITY: run.identity}).info.run_id
        for name, value in run.figures.items():
            client.log_metric(made, name, value)
        for name, text in run.facts.items():
            client.log_param(made, name, text)
        for path in run.files:
            client.log_artifact(made, str(path))
        client.set_terminated(made, "FINISHED")
    except Exception as error:  # MLflow's, those of its stores, and of the libraries by which it asks servers
        raise ServerError(f"evaluation.tracking.mlflow: {uri} does not take the figures: {error}") from error
    return f"{uri}, run {made}"
