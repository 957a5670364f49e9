"""What a task needs to know of a served model before it asks it, whatever the API."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Interface:
    """What a served model takes: ``ModelInterface`` of Triton's models, ``Capabilities`` of an OpenAI API.

    Attributes:
        takes_ids, takes_text: whether prompts may be token ids, and texts.
        max_batch_size: largest number of rows in one request.
        parameters: the parameters of a config.pbtxt, as text; empty without one.
        has_sessions: whether the model is stateful; its tensors then have an additional first axis of length 1.
        is_encoder_decoder: whether the model, or the model inside an ensemble, is known to be an encoder-decoder.
        is_decoupled: whether the model may send several answers to one request, over a stream.
        max_queue_delay_us: how long a batcher in front of the model waits for further requests; None without one.
    """

    takes_ids: bool
    takes_text: bool = True
    max_batch_size: int
    parameters: dict[str, str] = field(default_factory=dict)
    has_sessions: bool = False
    is_encoder_decoder: bool = False
    is_decoupled: bool = False
    max_queue_delay_us: int | None = None

    @property
    def can_score(self) -> bool:
        """Whether the model says that it scores given tokens; FasterTransformer may say so and not do it."""
        return False
