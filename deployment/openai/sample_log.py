"""A file with some of the endpoint's own requests, for ``evaluation=monitor``: what was asked, answered and scored.

Which requests are noted is drawn before anything of them is known. A line has the prompt's tokens, the answer's and the
log probability that the model gave each of these: whoever reads it reads what clients wrote, so the file is its owner's
alone. It and the older one beside it, ``<name>.1``, have at most the given size together, of all processes that write.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from deployment.openai.engine.asked import SequenceRequest
from deployment.openai.engine.generation import Piece, Sink
from deployment.openai.engine.scores import GENERATED
from deployment.openai.texts.offered_models import Model
from ft_format.socket_messages import Scalar
from ft_format.tensors import INPUTS
from handover.endpoint import MODEL_DIGEST
from handover.errors import ConfigError

_RAW = "is_return_raw_log_probs"
_OWNERS_ALONE = 0o600
_DIGITS = 6  # behind the point of a log probability; fp32 has no more of it


class SampleLog:
    """Notes a share of the requests.

    Args:
        path: of the file, which is continued; None: nothing is noted.
        share: of the requests, 0 to 1.
        most_bytes: of both files.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: Path | None, share: float, most_bytes: int) -> None:
        self._path, self._share, self._most_bytes = path, share, most_bytes // 2
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with closing(_File(path)) as file:
                    os.fchmod(file.descriptor, _OWNERS_ALONE)
            except OSError as error:
                raise ConfigError(f"{path} cannot be written: {error.strerror}", "give another sample_log") from error

    def watch(self, request: SequenceRequest, sink: Sink) -> tuple[SequenceRequest, Sink]:
        """Return what is asked for and who takes the answer: with log probabilities, and noted, where it is drawn."""
        if self._path is None or random.random() >= self._share or not _is_scored(request):
            return request, sink
        tensors = {**request.tensors, _RAW: Scalar(True, INPUTS[_RAW].kind)}
        outputs = tuple(dict.fromkeys((*request.outputs, GENERATED[0])))
        return replace(request, tensors=tensors, outputs=outputs), _Noted(self, request, sink)

    def write(self, request: SequenceRequest, pieces: Sequence[Piece]) -> None:
        """Append an answer that is complete; what cannot be written is a line of the server's log, once."""
        tokens = [token for piece in pieces for token in piece.tokens]
        log_probs = [round(score.log_prob, _DIGITS) for piece in pieces for score in piece.scores]
        if not tokens or self._path is None:
            return
        entry: dict[str, object] = {"model": request.model.names[0]}
        entry |= {"model_digest": request.model.settings.get(MODEL_DIGEST, "")}
        entry |= {"prompt": list(request.prompt), "tokens": tokens, "log_probs": log_probs}
        try:
            _append(self._path, entry, self._most_bytes)
        except OSError as error:
            sys.stdout.write(f"      openai     requests are no more noted: {self._path}: {error.strerror}\n")
            self._path = None


def check_model(model: Model) -> None:
    """Refuse to note requests of a model that does not tell log probabilities of its own; ConfigError."""
    if _RAW not in model.inputs:
        raise ConfigError(
            f"sample_log is given, and model '{model.names[0]}' has no tensor {_RAW}",
            "serve it with the drop-in engine, or leave deployment.openai_sample_log out",
        )


def _is_scored(request: SequenceRequest) -> bool:
    """Whether the reference has a log probability for each token: of one answer, of a decoder without an adapter."""
    model = request.model
    return not (request.is_searched or model.is_encoder_decoder or model.adapter)


class _Noted:
    """Passes an answer on, and notes it once it is complete."""

    def __init__(self, log: SampleLog, request: SequenceRequest, sink: Sink) -> None:
        self._log, self._request, self._sink = log, request, sink
        self._pieces = list[Piece]()

    def get_ready(self) -> None:
        """Do what can be done before the first piece."""
        self._sink.get_ready()

    def put(self, pieces: Sequence[Piece]) -> bool:
        """Pass pieces on; returns whether the client is far behind."""
        self._pieces += pieces
        if pieces[-1].finish_reason is not None:
            self._log.write(self._request, self._pieces)
        return self._sink.put(pieces)

    async def catch_up(self) -> None:
        """Wait until the client is no more behind."""
        await self._sink.catch_up()


class _File:
    """The file, open to be continued, which no other process writes meanwhile."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self.descriptor = os.open(path, flags, _OWNERS_ALONE)
        fcntl.flock(self.descriptor, fcntl.LOCK_EX)

    def close(self) -> None:
        """Release the file, so that others write it."""
        os.close(self.descriptor)


def _append(path: Path, entry: dict[str, object], most_bytes: int) -> None:
    """Append a line with the time; a file that is full becomes the older one, in place of the one before."""
    while True:
        with closing(_File(path)) as file:
            if not path.exists() or not os.path.samestat(os.fstat(file.descriptor), path.stat()):
                continue  # another process has just made it the older one
            line = json.dumps({"time_ns": time.time_ns(), **entry}, separators=(",", ":")).encode() + b"\n"
            if len(line) > most_bytes:
                return
            if os.fstat(file.descriptor).st_size + len(line) <= most_bytes:
                os.write(file.descriptor, line)
                return
            path.rename(path.with_name(f"{path.name}.1"))
