"""What the engine is asked for, one answer at a time."""

from __future__ import annotations

from dataclasses import dataclass

from deployment.openai.engine.tensors import Tensors
from deployment.openai.texts.offered_models import Model


@dataclass(frozen=True)
class SequenceRequest:
    """What one answer is asked for with.

    Attributes:
        model: that is asked.
        prompt: its token ids.
        max_tokens: to generate at most.
        tensors: of the request.
        outputs: names of the tensors that are to be answered.
        stops: strings that end the text.
        stop_ids: tokens that the client wants the answer to end with.
        end_ids: tokens of the model that end an answer; empty where they are to be ignored.
        min_tokens: before which no stop string counts.
        request_id: for the server's log.
        arrived_ns: when the client's request was there, of time.monotonic_ns.
        is_searched: whether beams are searched, so that only the last answer counts.
        is_streamed: whether tokens are wanted one by one: the client wants a stream, or a string may end the text.
    """

    model: Model
    prompt: tuple[int, ...]
    max_tokens: int
    tensors: Tensors
    outputs: tuple[str, ...]
    stops: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    end_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    request_id: str = ""
    arrived_ns: int = 0
    is_searched: bool = False
    is_streamed: bool = True

    @property
    def shown(self) -> int:
        """Tokens in front of the generated ones in the engine's answers: a decoder's begin with the prompt."""
        return 0 if self.model.is_encoder_decoder else len(self.prompt)
