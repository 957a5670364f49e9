"""What a task needs to know of a served model before it asks it, whatever the API."""

from __future__ import annotations

from typing import Protocol


class Interface(Protocol):
    """What a served model takes: ``ModelInterface`` of Triton's models, ``Capabilities`` of an OpenAI API."""

    @property
    def takes_ids(self) -> bool:
        """Whether prompts may be token ids."""

    @property
    def takes_text(self) -> bool:
        """Whether prompts may be texts."""

    @property
    def can_score(self) -> bool:
        """Whether the model says that it scores given tokens; FasterTransformer may say so and not do it."""

    @property
    def max_batch_size(self) -> int:
        """Largest number of rows in one request."""

    @property
    def parameters(self) -> dict[str, str]:
        """The parameters of a config.pbtxt; empty without one."""

    @property
    def has_sessions(self) -> bool:
        """Whether the model is stateful."""

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the model is known to be an encoder-decoder."""

    @property
    def is_decoupled(self) -> bool:
        """Whether the model may send several answers to one request, over a stream."""

    @property
    def max_queue_delay_us(self) -> int | None:
        """How long a batcher in front of the model waits for further requests; None without one."""
