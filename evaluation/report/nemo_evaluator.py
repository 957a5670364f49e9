"""The accuracy of a run as NeMo Evaluator's ``results.yml``, for what reads those: its launcher's exporters, others."""

from __future__ import annotations

from typing import Any

import yaml

from evaluation.report.data import Evaluation, Findings
from evaluation.tasks.metric import Metric

FILE_NAME = "results.yml"


def render_results(findings: Findings) -> str:
    """Render every reliable figure; empty where there is none, as of an evaluation that failed."""
    sound = [evaluation for evaluation in findings.evaluations if not evaluation.doubt and _metrics(evaluation)]
    if not sound:
        return ""
    names = ",".join(dict.fromkeys(evaluation.task for evaluation in sound))
    content = {
        "command": f"slipway stages=[evaluate] evaluation=[{names}]",
        "git_hash": sound[0].commit or None,
        "config": {"type": names},
        "target": {"api_endpoint": {"model_id": findings.title}},
        "results": {"tasks": {each.name: {"metrics": _metrics(each)} for each in sound}, "groups": {}},
    }
    return str(yaml.safe_dump(content, sort_keys=False))


def _metrics(evaluation: Evaluation) -> dict[str, Any]:
    known = [metric for metric in evaluation.metrics if metric.value is not None]
    return {metric.name: {"scores": {metric.name: _score(metric)}} for metric in known}


def _score(metric: Metric) -> dict[str, Any]:
    stats = {"count": metric.n} | ({} if metric.stderr is None else {"stderr": metric.stderr})
    return {"value": metric.value, "stats": stats}
