"""The report's sentences and table cells, the same on the terminal, in Markdown and in HTML."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from evaluation.report.data import Evaluation, Findings, StageOutcome
from evaluation.report.formatting import TextTable, show_figure, show_percent
from evaluation.report.judgement import Judgement
from evaluation.report.tables import speed_sentences
from evaluation.speed.tables.table import Row
from evaluation.tasks.metric import FRACTION, HOLDS, INCONCLUSIVE, Metric
from ft_format.weight_format import KEY, find_format
from handover.endpoint import WEIGHTS_DIGEST
from handover.manifest import ORIGIN
from handover.progress import human_bytes, human_time

ACCURACY_COLUMNS = ("Figure", "Value", "95% interval", "Samples", "Definition")
ANSWERED = ("Name",)
BASELINE_COLUMNS = ("Baseline", "Change")
GATE_COLUMNS = ("Figure", "Rule", "Verdict", "Reason")
_MOST_SCORES = 4  # of an evaluation in the summary; its table has all
STAGE_COLUMNS = ("Stage", "State", "Time", "Log")
_CHECKPOINTS = ("ft_checkpoint", "huggingface")
_LABELS = {
    "model": "Triton's model",
    "ft_checkpoint": "FT checkpoint",
    "ft_checkpoint_digest": "FT checkpoint digest",
    "huggingface": "Hugging Face directory",
    "huggingface_digest": "Hugging Face directory's digest",
}


def summarise_findings(findings: Findings, judgement: Judgement | None = None) -> str:
    """Summarise the deployment, its accuracy, its speed and its failures in a few sentences."""
    sentences = [_identity(findings)]
    if judgement is not None and judgement.verdict:
        sentences.append(f"The gate says {judgement.verdict}.")
    for evaluation in findings.evaluations:
        if evaluation.verdict:
            failing = () if evaluation.verdict == HOLDS else evaluation.reasons
            sentences.append(verdict_sentence(replace(evaluation, reasons=failing)))
            continue
        scores = [f"{cells[0]} {cells[1]}" for cells in map(accuracy_cells, evaluation.metrics) if cells[1]]
        if scores:
            sentences.append(f"On {evaluation.heading}: {', '.join(scores[:_MOST_SCORES])}.")
    sentences += speed_sentences(findings.benchmarks)
    bad = [outcome for outcome in findings.stages if outcome.is_bad]
    sentences += [f"Stage {outcome.label}: {outcome.state}." for outcome in bad]
    return " ".join(sentences)


def verdict_sentence(evaluation: Evaluation) -> str:
    """Return the result of an evaluation with limits of its own as a sentence; empty for any other."""
    if not evaluation.verdict:
        return ""
    against = f" against {evaluation.against}" if evaluation.against else ""
    first = f" The first difference: {evaluation.first_difference}." if evaluation.first_difference else ""
    reasons = f": {'; '.join(evaluation.reasons)}" if evaluation.reasons else ""
    verb = "is inconclusive" if evaluation.verdict == INCONCLUSIVE else evaluation.verdict.lower()
    return f"{evaluation.title} {verb}{against}{reasons}.{first}"


def accuracy_cells(metric: Metric) -> tuple[str, ...]:
    """Return a metric's cells under ACCURACY_COLUMNS; missing values are empty."""
    show = show_percent if metric.unit == FRACTION else show_figure
    value = show(metric.value)
    error = "" if metric.interval is None else "{} to {}".format(*map(show, metric.interval))
    samples = f"{metric.n:,}" + (f" ({metric.failed:,} failed)" if metric.failed else "")
    return metric.name, value, error, samples, metric.definition


def stage_cells(outcome: StageOutcome, results: Path) -> tuple[str, ...]:
    """Return a stage's cells under STAGE_COLUMNS."""
    time = "" if outcome.elapsed_s is None else human_time(outcome.elapsed_s)
    return outcome.label, outcome.state, time, relative_path(outcome.log, results)


def describe_provenance(findings: Findings) -> TextTable:
    """List data, model, versions and machines of the figures, as far as they are known."""
    facts: list[tuple[str, str]] = [("Model", findings.title)]
    facts += _origin(findings)
    told = {"model_digest", WEIGHTS_DIGEST, *(findings.repository.made_from if findings.repository else ())}
    for evaluation in findings.evaluations:
        sha256 = f", sha256 {evaluation.data['sha256']}" if evaluation.data.get("sha256") else ""
        known = f" ({evaluation.data['known_as']})" if evaluation.data.get("known_as") else ""
        if file := evaluation.data.get("file"):
            taken = f", {evaluation.samples:,} samples were taken"
            facts.append((f"Data of {evaluation.heading}", f"{file}{sha256}{known}{taken}"))
        facts.append((f"Evaluated ({evaluation.heading})", _measured(evaluation.timestamp, evaluation.commit)))
        facts += [(_label(key), str(value)) for key, value in evaluation.model.items() if value and key not in told]
    for benchmark in findings.benchmarks:
        for row in benchmark.rows[-1:]:
            facts.append((f"Measured ({benchmark.name})", _measured(row.timestamp, row.commit)))
            if benchmark.is_load:
                facts.append((f"Digest of the model served ({benchmark.name})", row.model_digest))
            else:
                repeats = f"{row.warmup_requests} and {row.repeats} a point"
                facts += [(f"Warm-up and repeats ({benchmark.name})", repeats), *_costs(row)]
            facts += [("Versions", row.versions), ("Machine", _machine(row))]
    return TextTable("", ("What", "Value"), tuple(dict.fromkeys(fact for fact in facts if fact[1])))


def _origin(findings: Findings) -> list[tuple[str, str]]:
    """List the source of the served model and the settings of its export."""
    facts: list[tuple[str, str]] = []
    if source := findings.origin:
        facts.append(
            ("Checkpoint", ", ".join(str(source[key]) for key in ("checkpoint", "source_format") if source.get(key)))
        )
    if findings.repository is not None:
        facts.append(
            ("Model repository", f"{findings.repository.digest}, {human_bytes(findings.repository.size_bytes)}")
        )
        made_from = _flatten(findings.repository.made_from)
        facts += [
            (_label(key), str(value))
            for key, value in made_from
            if key.startswith(_CHECKPOINTS) and not key.startswith(ORIGIN)
        ]
        settings = (f"{key} {value}" for key, value in made_from if not key.startswith(_CHECKPOINTS))
        facts.append(("Exported with", ", ".join(settings)))
    return facts


def relative_path(path: str, results: Path) -> str:
    """Show a path below the results directory relative to it."""
    if path and Path(path).is_relative_to(results):
        return Path(path).relative_to(results).as_posix()
    return path


def _identity(findings: Findings) -> str:
    settings: dict[str, str] = {}
    for evaluation in findings.evaluations:
        settings.update({key: str(value) for key, value in evaluation.model.items() if value})
    for row in (row for benchmark in findings.benchmarks for row in benchmark.rows[:1]):
        columns = ("engine", "tensor_para_size", "pipeline_para_size", "weight_data_type", "data_type", "replicas")
        settings.update({name: str(getattr(row, name)) for name in columns if getattr(row, name)})
    parts = [
        text.format(settings[key])
        for key, text in (
            ("tensor_para_size", "tensor parallelism {}"),
            ("pipeline_para_size", "pipeline parallelism {}"),
            ("weight_data_type", "{} weights"),
            ("data_type", "{} computation"),
            ("replicas", "{} replicas"),
            (KEY, f"{find_format(settings.get(KEY)).name} in the engine"),
        )
        if settings.get(key, "0") != "0"
    ]
    engine = f"is served by {settings['engine']}" if settings.get("engine") else "was deployed"
    return f"{findings.title} {engine}" + (f" with {', '.join(parts)}." if parts else ".")


def _measured(timestamp: str, commit: str) -> str:
    return ", ".join(part for part in (timestamp, f"commit {commit}" if commit else "") if part)


def _machine(row: Row) -> str:
    memory = f"{human_bytes(row.memory_bytes)} of memory" if row.memory_bytes else ""
    cores = f"{row.cores} cores" if row.cores else ""
    return ", ".join(part for part in (row.cpu, cores, memory, row.gpu) if part)


def _costs(row: Row) -> list[tuple[str, str]]:
    """List the resources at the end of a sweep; peaks only grow, so that the last row has them."""
    memory, gpu_memory = row.figures.get("server_memory_peak_bytes"), row.figures.get("gpu_memory_peak_bytes")
    start_s, load_s = row.figures.get("server_start_s"), row.figures.get("server_load_s")
    loading = f", {show_figure(load_s)} s of it to load the model" if load_s is not None else ""
    return [
        ("Server start", "" if start_s is None else f"{show_figure(start_s)} s{loading}"),
        ("Server memory, peak", "" if memory is None else human_bytes(memory)),
        ("GPU memory, peak", "" if gpu_memory is None else human_bytes(gpu_memory)),
    ]


def _label(key: str) -> str:
    return _LABELS.get(key) or key.replace("_", " ").replace(".", ": ").capitalize()


def _flatten(content: object, prefix: str = "") -> list[tuple[str, object]]:
    if not isinstance(content, dict):
        return [(prefix, content)]
    return [
        pair for key, value in content.items() for pair in _flatten(value, f"{prefix}.{key}" if prefix else str(key))
    ]
