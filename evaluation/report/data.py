"""The results of a run, read for the report, with a remark for everything that is missing."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evaluation.arguments import ADAPTER, result_name
from evaluation.report.benchmarks import Benchmark, read_benchmarks
from evaluation.report.directions import direction_of_metric
from evaluation.report.published import PARTIAL, Remarks, newest_results
from evaluation.tasks.metric import FAILS, Metric
from handover.errors import ArtefactError
from handover.manifest import ORIGIN, RANDOM_WEIGHTS, Manifest
from handover.regular_file import read_text

_NOT_RUN = "not run"
_BAD_STATES = ("failed", "interrupted", _NOT_RUN)
_AFTERWARDS = ("report", "tracking", "gate")


@dataclass(frozen=True)
class StageOutcome:
    """How one stage of the run ended.

    Attributes:
        stage: convert, export, deploy, evaluate, benchmark.
        name: name of the job.
        state: done, skipped, failed, interrupted or not run.
        elapsed_s: wall time in seconds; None if the stage did not run.
        error: last lines of the log; empty if the stage succeeded.
        log: path of the log; empty if the stage did not run.
        label: name for readers, made of the log's name, which is different for each of several evaluations.
    """

    stage: str
    name: str
    state: str
    elapsed_s: float | None
    error: str
    log: str
    label: str

    @property
    def is_bad(self) -> bool:
        """Whether the stage failed, was interrupted or did not run."""
        return self.state in _BAD_STATES


@dataclass(frozen=True)
class Evaluation:
    """One ``metrics.json``.

    Attributes:
        adapter: the LoRA adapter that answered; empty for the model alone.
        metrics: figures of the task.
        samples: number of samples.
        failed: number of samples without a score.
        cut_contexts: number of samples whose context was cut to the model's positions.
        data: file, sha256 and known_as.
        model: Triton's name, engine, digest and settings of the deployment.
        commit, timestamp: code and time of the evaluation.
        finished: False for the results of a failed or interrupted stage.
        verdict: HOLDS, FAILS or INCONCLUSIVE where the evaluation has limits of its own; empty otherwise.
        reasons: reasons of the verdict.
        against: the reference of the comparison; empty without one.
        first_difference: position of the first difference in words; empty without one.
    """

    task: str
    metrics: tuple[Metric, ...]
    samples: int
    failed: int
    cut_contexts: int
    data: Mapping[str, str]
    model: Mapping[str, str]
    commit: str
    timestamp: str
    finished: bool
    verdict: str = ""
    reasons: tuple[str, ...] = ()
    against: str = ""
    first_difference: str = ""
    adapter: str = ""

    @property
    def name(self) -> str:
        """What its figures are called by, which is that of its directory."""
        return result_name(self.task, self.adapter)

    @property
    def heading(self) -> str:
        """What readers call it by."""
        return f"{self.task} with adapter {self.adapter}" if self.adapter else self.task

    @property
    def title(self) -> str:
        """The same where a line begins."""
        return self.heading[:1].upper() + self.heading[1:]

    @property
    def doubt(self) -> str:
        """Why the figures are not reliable; empty if they are."""
        if not self.finished and not self.verdict:
            return "the evaluation did not finish"
        if self.model.get(RANDOM_WEIGHTS):
            return "the weights are random"
        return f"{self.failed} of {self.samples} samples have no score" if self.failed else ""


@dataclass(frozen=True)
class Findings:
    """The content of the report.

    Attributes:
        stages: stages in their order; empty if the runner left no record.
        evaluations: results of tasks and of parity.
        benchmarks: static sweeps, then loads.
        repository: manifest of the model repository; None without one.
        remarks: a sentence for everything that is missing, unfinished or contradictory.
        origin: what the FT checkpoint in the repository was made from; empty if unknown.
        left_out: why the figures of an evaluation or a benchmark were left out, by its name.
    """

    title: str
    stages: tuple[StageOutcome, ...]
    evaluations: tuple[Evaluation, ...]
    benchmarks: tuple[Benchmark, ...]
    repository: Manifest | None
    remarks: tuple[str, ...]
    origin: Mapping[str, Any] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)


def collect_findings(results: Path, title: str, stages: Path) -> Findings:
    """Read all results of a run.

    Args:
        results: results directory of the run.
        title: name of the model; empty for that of the model which a foreign API serves.
        stages: the runner's ``stages.json``.
    """
    remarks = Remarks()
    outcomes = _read_stages(stages, remarks)
    evaluations = tuple(_read_evaluations(results / "evaluation", remarks))
    benchmarks = tuple(read_benchmarks(results / "benchmark", remarks))
    repository = _read_repository(results / "model_repo", remarks)
    if not evaluations:
        remarks.append("There are no accuracy figures: no evaluation left a result.")
    if not benchmarks:
        remarks.append("There are no latency figures: no benchmark left a result.")
    remarks += _identity_remarks(evaluations, benchmarks, repository)
    origin = _read_origin(results / "model_repo", repository)
    title = title or _served_name(evaluations, benchmarks)
    return Findings(title, outcomes, evaluations, benchmarks, repository, tuple(remarks), origin, remarks.left_out)


def _served_name(evaluations: Sequence[Evaluation], benchmarks: Sequence[Benchmark]) -> str:
    """Return the name of the deployment that was measured or, where it has none, of the model that it serves."""
    rows = [row for benchmark in benchmarks for row in benchmark.rows]
    names = [row.deployment_label for row in rows] + [row.model for row in rows]
    names += [str(evaluation.model.get("model", "")) for evaluation in evaluations]
    return next(filter(None, names), "a deployment that nothing was measured of")


def _read_stages(path: Path, remarks: list[str]) -> tuple[StageOutcome, ...]:
    try:
        return tuple(
            StageOutcome(
                stage=str(entry["stage"]),
                name=str(entry.get("name") or ""),
                state=str(entry["state"]),
                elapsed_s=entry.get("elapsed_s"),
                error=_lines(entry.get("error")),
                log=str(entry.get("log") or "") if entry["state"] != _NOT_RUN else "",
                label=Path(str(entry.get("log") or "")).stem.replace("_", " ") or str(entry["stage"]),
            )
            for entry in json.loads(read_text(path))
            if entry["stage"] not in _AFTERWARDS
        )
    except OSError:
        remarks.append("How the stages ended is not known: the runner left no record of them.")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        remarks.append(f"How the stages ended is not known: {path.name} is damaged ({error}).")
    return ()


def _read_evaluations(root: Path, remarks: Remarks) -> Iterable[Evaluation]:
    for path, finished in newest_results(root, "metrics.json", remarks, is_written_last=True):
        task = path.parent.name.removesuffix(PARTIAL)
        try:
            evaluation = _evaluation(json.loads(path.read_text()), finished)
        except (ValueError, KeyError, TypeError) as error:
            sentence = f"The figures of {task} are damaged and left out ({error})."
            remarks.leave_out(task, sentence, f"the file is damaged ({error})")
            continue
        if evaluation.verdict == FAILS:
            remarks.append(f"The evaluation {task} fails: {'; '.join(evaluation.reasons)}.")
        elif not finished:
            remarks.append(f"The evaluation {task} did not finish: its figures are not final.")
        if evaluation.model.get(RANDOM_WEIGHTS):
            remarks.append(
                f"The figures of {task} are those of random weights: they say nothing about a trained model."
            )
        if evaluation.failed:
            remarks.append(f"{evaluation.failed} of {evaluation.samples} samples of {task} have no score.")
        if evaluation.cut_contexts:
            remarks.append(f"{evaluation.cut_contexts} contexts of {task} were cut to the model's positions.")
        yield evaluation


def _evaluation(content: Mapping[str, Any], finished: bool) -> Evaluation:
    first = content.get("first_difference")
    return Evaluation(
        task=content["task"],
        metrics=tuple(_metric(metric) for metric in content["metrics"]),
        samples=content["samples"],
        failed=content["failed"],
        cut_contexts=content.get("cut_contexts", 0),
        data=content["data"],
        model=content["model"],
        commit=content.get("commit", ""),
        timestamp=content.get("timestamp", ""),
        finished=finished,
        verdict=content.get("verdict", ""),
        reasons=tuple(content.get("reasons", ())),
        against=content.get("source", {}).get("computed_by", ""),
        first_difference=f"prompt {first['prompt']}, generated token {first['token']}" if first else "",
        adapter=str(dict(content["model"]).get(ADAPTER, "")),
    )


def _metric(content: Mapping[str, Any]) -> Metric:
    """Read a figure; files of versions before 2 do not say which direction is better."""
    return Metric(**{"better": direction_of_metric(content["name"]), **content})


def _read_repository(root: Path, remarks: list[str]) -> Manifest | None:
    try:
        return Manifest.read(root)
    except ArtefactError as error:
        if root.is_dir():
            remarks.append(f"The model repository's origin is not known: {error.problem}.")
        return None


def _read_origin(root: Path, repository: Manifest | None) -> Mapping[str, Any]:
    if repository is not None and ORIGIN in repository.made_from:
        return dict(repository.made_from[ORIGIN])
    for path in sorted(root.glob("fastertransformer/1/*-gpu")):  # exported by Slipway 0.1
        with contextlib.suppress(ArtefactError):
            return Manifest.read(path).made_from
    return {}


def _identity_remarks(
    evaluations: Sequence[Evaluation], benchmarks: Sequence[Benchmark], repository: Manifest | None
) -> list[str]:
    """Return a remark if the figures do not all belong to the model in the repository."""
    digests = {f"evaluation {e.name}": e.model.get("model_digest", "") for e in evaluations}
    for benchmark in benchmarks:
        for row in benchmark.rows:
            digests[f"benchmark {benchmark.name}"] = row.model_digest
    if repository is not None:
        digests["the model repository"] = repository.digest
    known = {digest for digest in digests.values() if digest}
    if len(known) < 2:
        return []
    listed = "; ".join(f"{name}: {digest[:19]}" for name, digest in digests.items() if digest)
    return [f"These figures are not all of one model ({listed})."]


def _lines(error: Any) -> str:
    if isinstance(error, list):
        return "\n".join(str(line) for line in error).strip()
    return str(error or "").strip()
