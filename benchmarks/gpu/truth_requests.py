"""Requests of every kind as clients send them, and how they are sent to an engine: for benchmarks.gpu.truth."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from backends.fastertransformer.engine.arrays import Array
from backends.fastertransformer.engine.engine import Engine
from backends.fastertransformer.engine.rows.answer import Tensors
from benchmarks.gpu.sizes import for_encoder
from ft_format.tensors import NO_TOKEN

from .truth_families import Shape

KINDS = ("greedy", "greedy", "greedy", "drawn", "drawn", "beams", "penalties", "words", "grammar")
_LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 200, 255, 256, 257, 511, 600, 1023)
OUTPUTS, LONGER_OUTPUTS = (1, 5, 20, 48), (5, 48, 112)
_LONG = (1500, 2500, 4000)
_WAIT_S = 180.0
_LETTERS, _END = b"[a-z]{1000,}", 3  # more letters than any answer has, so its end, which a grammar needs, never comes


@dataclass(frozen=True)
class Ask:
    """One request of one row.

    Attributes:
        kind: of KINDS.
        prompt: its tokens.
        tensors: by FasterTransformer's names.
        is_streaming: whether its tokens are sent as they come.
        top_k: of a drawn one; 0: any token may be drawn.
        bad: tokens that never come.
        width: beams.
        adapter: that it names; empty: none.
    """

    kind: str
    prompt: list[int]
    tensors: dict[str, Array]
    is_streaming: bool
    top_k: int = 0
    bad: tuple[int, ...] = ()
    width: int = 1
    adapter: str = ""


@dataclass
class Told:
    """What came of a request.

    Attributes:
        tensors: of the last answer; None: it failed.
        problem: why.
        parts: how many tokens each answer had, of a stream.
        is_consistent: whether each answer of a stream begins with the tokens of the one before.
    """

    tensors: dict[str, Array] | None = None
    problem: str = ""
    parts: int = 0
    is_consistent: bool = True


def _column(value: float, dtype: Any) -> Array:
    return np.full((1, 1), value, dtype)


def draw_requests(
    shape: Shape, count: int, seed: int, is_encoder: bool, outputs: tuple[int, ...] = OUTPUTS, longest: int = 0
) -> list[Ask]:
    """Draw requests, the same every time: prompts around the ends of pages, a fifth of which begins alike.

    Args:
        shape: of the model.
        count: of requests.
        seed: of the draw.
        is_encoder: whether they are an encoder-decoder's.
        outputs: how many tokens they ask for.
        longest: tokens of a prompt at most; 0: as many as the model has positions for.
    """
    rng = random.Random(seed)
    most = longest or shape.positions - 64
    lengths = [length for length in _LENGTHS if length < most // 2 or length < 32]
    long = [length for length in _LONG if length < most] or [most // 2]
    shared = [[rng.randrange(3, shape.vocab) for _ in range(min(size, most // 4))] for size in (900, 257, 64)]
    asks = []
    for place in range(count):
        own = [rng.randrange(3, shape.vocab) for _ in range(rng.choice(long if place % 16 == 7 else lengths))]
        prompt = ((rng.choice(shared) if place % 5 == 0 else []) + own)[:most]
        asks.append(_ask(rng, KINDS[place % len(KINDS)], prompt, shape, is_encoder, rng.choice(outputs)))
    return asks


def _ask(rng: random.Random, kind: str, prompt: list[int], shape: Shape, is_encoder: bool, count: int) -> Ask:
    tensors = {
        "input_ids": np.array([prompt], np.uint32),
        "input_lengths": _column(len(prompt), np.uint32),
        "request_output_len": _column(count, np.uint32),
        "end_id": _column(NO_TOKEN, np.uint32),
    }
    top_k, bad, width = 0, tuple[int, ...](), 1
    if kind == "beams":
        width = rng.choice([2, 3, 4])
        tensors["beam_width"] = _column(width, np.uint32)
        tensors["is_return_log_probs"] = _column(1, np.bool_)
    else:
        tensors["is_return_raw_log_probs"] = _column(1, np.bool_)
    if kind == "drawn":
        top_k = rng.choice([0, 5, 40, 300])
        tensors |= {
            "random_seed": _column(rng.randrange(1 << 40), np.uint64),
            "runtime_top_k": _column(top_k, np.uint32),
        }
        tensors |= {"runtime_top_p": _column(rng.choice([0.5, 0.9, 1.0]), np.float32)}
        tensors |= {"temperature": _column(rng.choice([0.7, 1.0, 1.3]), np.float32)}
    elif kind == "penalties":
        tensors |= {"repetition_penalty": _column(1.3, np.float32), "min_length": _column(5, np.int32)}
    elif kind == "words":
        bad = tuple(rng.randrange(3, shape.vocab) for _ in range(shape.vocab // 8))
        ends = [*range(1, len(bad) + 1)]
        tensors["bad_words_list"] = np.array([[list(bad), ends]], np.int32)
        stop = [rng.randrange(3, shape.vocab) for _ in range(4)]
        tensors["stop_words_list"] = np.array([[stop, [2, 4, -1, -1]]], np.int32)
    elif kind == "grammar":
        tensors["end_id"] = _column(_END, np.uint32)
        tensors["guided_decoding_guide_type"] = np.array([[b"regex"]], object)
        tensors["guided_decoding_guide"] = np.array([[_LETTERS]], object)
    is_streaming = kind != "beams" and rng.random() < 0.5
    return Ask(kind, prompt, for_encoder(tensors) if is_encoder else tensors, is_streaming, top_k, bad, width)


def tokens_of(ask: Ask, tensors: dict[str, Array], beam: int = 0) -> list[int]:
    """Give the generated tokens of an answer."""
    start = int(tensors["response_input_lengths"][0, beam]) if "response_input_lengths" in tensors else 0
    found: list[int] = tensors["output_ids"][0, beam, start : int(tensors["sequence_length"][0, beam])].tolist()
    return found


def serve(
    engine: Engine, asks: list[Ask], burst: int, seed: int, before: Callable[[int], None] | None = None
) -> list[Told]:
    """Send requests in bursts, in an order of their own, and wait for all answers.

    Args:
        engine: to ask.
        asks: the requests.
        burst: as many are sent at once, before a pause of up to 20 ms; 0: all of them.
        seed: of the order and the pauses.
        before: is called with the place of each request, before it is parsed.
    """
    rng, done = random.Random(seed), threading.Semaphore(0)
    told = [Told() for _ in asks]
    found = [list[int]() for _ in asks]

    def send(place: int) -> None:
        ask, own = asks[place], told[place]

        def take(answer: Any) -> None:
            if isinstance(answer, Tensors):
                tokens = tokens_of(ask, answer.tensors)
                own.is_consistent &= tokens[: len(found[place])] == found[place]
                own.tensors, found[place] = answer.tensors, tokens
                own.parts += 1
            own.problem = getattr(answer, "problem", "")
            if answer.is_final:
                done.release()

        engine.submit(engine.parse(ask.tensors), take, ask.is_streaming)

    order = list(range(len(asks)))
    rng.shuffle(order)
    for sent, place in enumerate(order, 1):
        if before:
            before(place)
        send(place)
        if burst and sent % burst == 0:
            time.sleep(rng.random() * 0.02)
    for _ in asks:
        if not done.acquire(timeout=_WAIT_S):
            lost = sum(each.tensors is None and not each.problem for each in told)
            raise RuntimeError(f"{lost} of {len(asks)} requests have no answer after {_WAIT_S:g} s")
    return told
