"""The Triton python-based backend ``fastertransformer``: translates between Triton and the engine, nothing else.

It serves every model whose config.pbtxt says ``backend: "fastertransformer"`` and honours that file's parameters; see
``engine/settings.py`` for them and for how a relative model_checkpoint_path is resolved. A backend directory needs this
file, ``replies.py``, ``published_metrics.py``, ``direct/`` and ``engine/`` beside it, all below a directory named
``fastertransformer``, and beside that directory the package ``ft_format``. This file may be a symbolic link, into a
checkout too.

``execute`` leaves requests to the engine and returns at once; ``replies`` sends the answers later, whole or, by a
decoupled model, token by token. The OpenAI endpoint of the same deployment asks through the socket of ``direct``.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils

_BACKENDS = Path(__file__).resolve().parent.parent
# ft_format lies beside this package where the backend is installed, and one directory above in a checkout.
sys.path[:0] = [str(_BACKENDS), *([] if (_BACKENDS / "ft_format").is_dir() else [str(_BACKENDS.parent)])]
# OpenMP's threads spin at each barrier, for milliseconds by default. On cores that are shared with other processes that
# makes requests slow (20 s instead of 2.5). 2000 iterations, 35 to 120 us, outlast most of the time between a step's
# products, and are about what a wake-up takes. Read when torch is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

from fastertransformer.direct.reply import DirectReply  # noqa: E402
from fastertransformer.direct.server import DirectServer  # noqa: E402
from fastertransformer.engine import Engine, EngineError, Settings, open_engine  # noqa: E402
from fastertransformer.engine.model.precision import choose_device  # noqa: E402
from fastertransformer.engine.parallel.group import Group  # noqa: E402
from fastertransformer.engine.parallel.rank import read_ranks, refuse_unassigned_rank  # noqa: E402
from fastertransformer.engine.rows.answer import INVALID, Answer, Failure  # noqa: E402
from fastertransformer.engine.scheduling.arrivals import Unparsed  # noqa: E402
from fastertransformer.engine.settings import read_settings  # noqa: E402
from fastertransformer.published_metrics import PublishedMetrics  # noqa: E402
from fastertransformer.replies import Replies, Reply  # noqa: E402

from ft_format.arrival import arrival_s, credible_s  # noqa: E402
from ft_format.socket_messages import DIRECTORY_VARIABLE, LOAD, UNLOAD, AdapterWish, socket_name  # noqa: E402

faulthandler.enable()  # a stub that a signal kills prints its stack to the server's log

_SEQUENCE_START, _SEQUENCE_END = 1, 2  # TRITONSERVER_REQUEST_FLAG_*
_STATEFUL_ROWS = 256  # of all conversations in one step


class TritonPythonModel:
    """One instance of a model."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the checkpoint that config.pbtxt names; an exception here keeps the model from being served."""
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
        try:
            self._settings = read_settings(parameters, Path(args["model_repository"]), args["model_version"])
            if idle_us := int(config.get("sequence_batching", {}).get("max_sequence_idle_microseconds", 0)):
                # Triton drops idle sessions too, and does not notify backends.
                self._settings = replace(self._settings, session_idle_s=idle_us / 1e6)
            self._engine = _open_engine(self._settings, config, args)
        except EngineError as error:
            raise pb_utils.TritonModelException(f"{args['model_name']}: {error}") from error
        self._is_decoupled = bool(config.get("model_transaction_policy", {}).get("decoupled", False))
        # FasterTransformer's rule: with sequence batching Triton's batch axis is a first axis of length 1 more.
        self._has_sessions = "sequence_batching" in config
        types = {entry["name"]: pb_utils.triton_string_to_numpy(entry["data_type"]) for entry in config["output"]}
        labels = {"model": args["model_name"], "version": args["model_version"]}
        limit_s = self._settings.request_timeout_s
        self._replies = Replies(pb_utils, types, self._has_sessions, labels, self._is_decoupled, limit_s)
        labels = {"model_name": args["model_name"], "engine": _instance_number(args)}
        room = self._engine.pages, self._engine.places
        self._metrics = PublishedMetrics(pb_utils, self._engine.metrics, labels, *room)
        self._direct = self._listen(args)
        pb_utils.Logger.log_info(f"{args['model_name']}: {self._engine.description}")

    def execute(self, requests: Sequence[Any]) -> None:
        """Leave requests to the engine; one that is invalid, or raises an exception, fails alone."""
        replies = [self._replies.open(request) for request in requests]
        calls = list[Callable[[], None]]()
        for request, reply in zip(requests, replies, strict=True):
            with _failing(reply):
                calls.append(self._read(request, reply))
        self._engine.announce(Unparsed(calls))
        if not self._settings.has_inflight_batching:  # Triton fills the next batch meanwhile
            for reply in replies:
                reply.sent.wait()

    def finalize(self) -> None:
        """Close the engine; Triton has waited for every answer before, and so does the socket."""
        if self._direct is not None:
            self._direct.refuse_more()
        try:
            self._engine.close()
        finally:
            if self._direct is not None:
                self._direct.close()
            self._metrics.close()
            self._replies.close()
            gc.freeze()  # the interpreter ends: looking for garbage in all of torch would take it half a second

    def _read(self, request: Any, reply: Reply) -> Callable[[], None]:
        """Copy what Triton takes back when execute has returned; returns the call that submits it."""
        given = {each.name(): each.as_numpy() for each in request.inputs()}
        tensors = {name: np.array(array[0] if self._has_sessions else array) for name, array in given.items()}
        session = None
        if self._has_sessions:
            session, flags = request.correlation_id(), request.flags()
            tensors["START"] = np.array([int(bool(flags & _SEQUENCE_START))], np.int32)
            tensors["END"] = np.array([int(bool(flags & _SEQUENCE_END))], np.int32)
        arrived_s = arrival_s(_parameters(request), reply.opened)

        def submit() -> None:
            with _failing(reply):
                self._ask(tensors, reply, self._is_decoupled, arrived_s, session)

        return submit

    def _submit_direct(self, tensors: dict[str, npt.NDArray[Any]], reply: DirectReply) -> None:
        arrived_s = credible_s(reply.asked.arrived_ns, reply.opened)
        self._ask(tensors, reply, self._is_decoupled and reply.asked.is_streamed, arrived_s)

    def _ask(
        self,
        tensors: dict[str, npt.NDArray[Any]],
        reply: Reply | DirectReply,
        is_streaming: bool,
        arrived_s: float,
        session: int | str | None = None,
    ) -> None:
        def answer(given: Answer) -> None:
            if isinstance(given, Failure) and reply.has_expired:
                given = Failure("request_timeout_s is over", given.code)
            reply.send(given)

        parsed = self._engine.parse(tensors)
        is_plain = isinstance(reply, DirectReply) and reply.wants_tokens_alone(parsed)
        self._engine.submit(
            parsed,
            answer,
            is_streaming=is_streaming,
            is_cancelled=reply.has_gone,
            session=session,
            arrived_s=arrived_s,
            is_behind=reply.is_behind,
            wants_tokens_alone=is_plain,
            name=reply.name,
        )

    def _change_adapters(self, wish: AdapterWish) -> Mapping[str, Mapping[str, str | int]]:
        if wish.action == LOAD:
            self._engine.load_adapter(wish.name, Path(wish.path))
        elif wish.action == UNLOAD:
            self._engine.unload_adapter(wish.name)
        return self._engine.adapters()

    def _listen(self, args: Mapping[str, str]) -> DirectServer | None:
        """Listen on a socket for the OpenAI endpoint, where the deployment wants one and requests stand for themselves.

        Sessions are Triton's, and so is what forms the batches of a model without in-flight batching.
        """
        directory = os.environ.get(DIRECTORY_VARIABLE, "")
        if not directory or self._has_sessions or not self._settings.has_inflight_batching:
            return None
        path = Path(directory) / socket_name(args["model_name"], args["model_version"], _instance_number(args))
        try:
            limit_s = self._settings.request_timeout_s or math.inf
            ways = self._engine.announce, self._submit_direct, self._change_adapters, self._replies.note_end
            return DirectServer(path, *ways, limit_s)
        except OSError as error:  # the endpoint then asks through Triton
            pb_utils.Logger.log_warn(f"{args['model_name']}: no socket for the OpenAI endpoint: {error}")
            return None


@contextmanager
def _failing(reply: Reply) -> Iterator[None]:
    """Turn an exception into an error reply to this request only."""
    try:
        yield
    except EngineError as error:
        reply.send(Failure(str(error), INVALID))
    except Exception as error:
        pb_utils.Logger.log_error(f"a request could not be read: {error!r}")
        reply.send(Failure(f"the request could not be read: {error!r}"))


def _parameters(request: Any) -> str:
    """Return what a client has set for a request beside its tensors, as JSON; old servers do not tell."""
    return str(request.parameters()) if hasattr(request, "parameters") else ""


def _instance_number(args: Mapping[str, str]) -> str:
    """Return the number of a model's instance: 0, 1, ... of the first group, 1_0, ... of others."""
    name = args.get("model_instance_name", "")
    return name.removeprefix(args["model_name"] + "_").removeprefix("0_") or "0"


def _open_engine(settings: Settings, config: Mapping[str, Any], args: Mapping[str, str]) -> Engine:
    device = choose_device(args["model_instance_kind"], int(args["model_instance_device_id"]))
    ranks = read_ranks(os.environ)
    instances = sum(int(each.get("count", 1)) for each in config.get("instance_group", []))
    if ranks and instances > 1:
        raise EngineError(f"instance_group asks for {instances} instances; several processes make up one")
    if ranks is None:
        refuse_unassigned_rank(os.environ, settings.world_size)
    group = Group(ranks, device, settings) if ranks else None
    # A stateful model's max_batch_size of 1 is Triton's: a request of it is [1, batch, n].
    rows = _STATEFUL_ROWS if "sequence_batching" in config else max(1, int(config.get("max_batch_size", 0)))
    return open_engine(settings, device, group, rows)
