"""Measure a deployment point by point; write the table and the manifest, and print a line for each point.

Points that an interrupted run with the same settings finished are kept.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from evaluation.client.client import Client
from evaluation.client.errors import UnreachableError
from evaluation.client.openai_client import OpenAIClient
from evaluation.client.served_identity import ADDRESS, check_unchanged
from evaluation.client.served_model import DeployedModel, has_random_weights
from evaluation.speed.provenance import describe_machine
from evaluation.speed.tables.row import SCHEMA_VERSION
from evaluation.speed.tables.table import FAILED, OK, OPENAI, TRITON, Row, Table
from ft_format.weight_format import KEY
from handover.endpoint import FLAGS, MODEL_DIGEST, REPLICAS, VERSIONS, Endpoint
from handover.errors import ConfigError, ServerError
from handover.manifest import Manifest, record_files
from handover.progress import Progress
from handover.provenance import made_by, read_commit

_USUAL_LENGTHS = ((60, 20), (225, 20), (200, 200))
"""Question answering, intent classification and translation, as in NVIDIA's published performance tables."""


@dataclass(frozen=True)
class MeasuredDeployment:
    """The deployment that a sweep measures.

    Attributes:
        source: the user's argument, from which the endpoint is read again during the sweep.
        endpoint: the endpoint when the sweep began.
        model: Triton's name of the model.
    """

    source: str
    endpoint: Endpoint
    model: str

    def check_unchanged(self) -> None:
        """Refuse to continue if the deployment was replaced; see ``served_identity.check_unchanged``."""
        check_unchanged(self.source, self.endpoint, self.model)

    def check_alive(self) -> None:
        """Refuse to measure further points if the server is gone.

        Raises:
            UnreachableError: no server answers.
        """
        if self.endpoint.is_openai:
            with OpenAIClient(self.endpoint, retries=0) as api:
                api.models()
            return
        with Client(self.endpoint.grpc_url, retries=0) as client:
            if not client.is_live():
                raise UnreachableError(
                    f"no server answers at {self.endpoint.grpc_url}", "start it and run again: points are kept"
                )


@dataclass(frozen=True)
class Sweep:
    """A deployment, the points to measure, and the function that measures one.

    Attributes:
        output: directory of the table.
        table: shape of the table.
        points: rows without figures, in the order of measuring.
        seed: seed of the prompts.
        steps, unit: maximum number of steps of a point for the progress bar, and their unit.
        measure: measures one point and calls its second argument after each step.
        describe: describes one finished row for the terminal.
        prepare: called once before the first point is measured.
    """

    name: str
    deployment: MeasuredDeployment
    output: Path
    table: Table
    points: Sequence[Row]
    seed: int
    steps: int
    unit: str
    measure: Callable[[Row, Callable[[], None]], Row]
    describe: Callable[[Row], str]
    prepare: Callable[[], None] = lambda: None

    def run(self, known: Sequence[Row] = ()) -> list[Row]:
        """Measure every point that no earlier run finished; the table is written after each.

        Args:
            known: rows of points that are not measured again, whatever their state.

        Raises:
            ServerError: the deployment was replaced, or is gone.
        """
        rows = self.finished_rows() | {row.point: row for row in known}
        outstanding = [point for point in self.points if point.point not in rows]
        self.output.mkdir(parents=True, exist_ok=True)
        if rows:  # the table of an interrupted run may have other points too
            self._write(rows)
        if outstanding:
            self.prepare()
        with Progress(self.name, len(outstanding) * self.steps, self.unit) as progress:
            for number, point in enumerate(outstanding, 1):
                self.deployment.check_unchanged()
                row = self.measure(point, progress.advance)
                if row.state == OK:  # a failed point has no figures that could be another model's
                    self.deployment.check_unchanged()
                rows[point.point] = row
                self._write(rows)
                if row.state == FAILED:
                    self.deployment.check_alive()
                progress.advance(number * self.steps - progress.done)  # the point may have ended early
        return [rows[point.point] for point in self.points]

    def finish(self, rows: Sequence[Row]) -> None:
        """Write the manifest and print a line for each point.

        Raises:
            ServerError: no point could be measured.
        """
        first = self.points[0]
        made_from = {
            "model": first.model,
            "model_digest": first.model_digest,
            "settings_fingerprint": first.settings_fingerprint,
            "seed": self.seed,
        }
        Manifest("benchmark", record_files(self.output), made_from, made_by()).write(self.output)
        for row in rows:
            sys.stdout.write(self.describe(row) + "\n")
        if all(row.state == FAILED for row in rows):
            raise ServerError(f"none of {len(rows)} points could be measured; the first: {rows[0].error}")

    def _write(self, rows: dict[tuple[str, str, float], Row]) -> None:
        kept = [rows[point.point] for point in self.points if point.point in rows]
        self.table.write(self.output / self.table.file_name, kept)

    def finished_rows(self) -> dict[tuple[str, str, float], Row]:
        """Return the rows of an interrupted run with the same settings; none if the model has no digest."""
        file, first = self.output / self.table.file_name, self.points[0]
        if not file.is_file() or not first.model_digest:
            return {}
        try:
            rows = self.table.read(file)
        except ValueError:
            return {}
        return {
            row.point: row for row in rows if row.state == OK and row.settings_fingerprint == first.settings_fingerprint
        }


def describe_deployment(served: DeployedModel, row: Row, decisive: Sequence[object]) -> Row:
    """Fill in the fields that all rows of a sweep have in common.

    Rows of other ``decisive`` settings are not kept when an interrupted run is resumed.
    """
    endpoint, machine = served.endpoint, describe_machine()
    settings = endpoint.settings
    row = replace(
        row,
        model=served.name or row.triton_model,
        engine=endpoint.engine,
        endpoint_kind=OPENAI if endpoint.is_openai else TRITON,
        tensor_para_size=settings.get("tensor_para_size", ""),
        pipeline_para_size=settings.get("pipeline_para_size", ""),
        replicas=int(settings[REPLICAS]) if REPLICAS in settings else None,
        weight_data_type=settings.get("weight_data_type", ""),
        data_type=settings.get("data_type", ""),
        model_digest=endpoint.model_digest or settings.get(MODEL_DIGEST, ""),
        is_random_weights=has_random_weights(endpoint),
        commit=read_commit(),
        schema_version=SCHEMA_VERSION,
        int8_mode=settings.get(KEY, ""),
        versions=settings.get(VERSIONS, ""),
        flags=settings.get(FLAGS, ""),
        cpu=machine.cpu,
        cores=machine.cores,
        memory_bytes=machine.memory_bytes,
        gpu=machine.gpu,
    )
    # Two starts of a deployment have different addresses; their points belong together.
    lasting = sorted((name, value) for name, value in settings.items() if name != ADDRESS)
    text = json.dumps([repr(row), lasting, *decisive])
    return replace(row, settings_fingerprint=hashlib.sha256(text.encode()).hexdigest()[:12])


def check_price(row: Row, address: str) -> None:
    """Refuse a price where the number of GPUs is not known: every figure that it is given for would be empty.

    Raises:
        ConfigError: there is a price and no number.
    """
    if row.gpu_hour_price is not None and row.gpus is None:
        raise ConfigError(
            f"{address} does not say on how many GPUs it serves, so that its tokens have no price",
            "give --gpus (benchmark.gpus), or leave gpu_hour_price out",
        )


def find_vocab_size(given: int | None, served: DeployedModel) -> int:
    """Return the size of the vocabulary that random prompts are drawn from.

    Raises:
        ConfigError: the size is neither given nor known.
    """
    size = given or served.vocab_size
    if size is None:
        raise ConfigError(
            f"the vocabulary size of the model at {served.endpoint.address} is unknown: its config.ini is not here",
            "give --vocab-size (benchmark.vocab_size)",
        )
    return size


def usual_lengths(max_positions: int | None) -> tuple[tuple[int, int], ...]:
    """Return the default pairs of input and output length.

    They are the pairs of the published tables that fit the model's positions or, if none fits, three quarters and one
    quarter of its positions.
    """
    fitting = tuple(pair for pair in _USUAL_LENGTHS if max_positions is None or sum(pair) <= max_positions)
    if fitting or max_positions is None:
        return fitting
    return ((max_positions - max_positions // 4, max_positions // 4),)
