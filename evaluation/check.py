"""What can be said about a task before a server is asked. The login side imports this: no numpy, no client."""

from __future__ import annotations

from handover.errors import ConfigError

_DECODERS_ALONE = ("lambada",)


def check_task(task: str, model: str, is_encoder_decoder: bool) -> None:
    """Refuse to score a model whose answers the task cannot be computed from.

    Args:
        task: name of the task.
        model: what is scored, for the message.
        is_encoder_decoder: the model is a T5.

    Raises:
        ConfigError: LAMBADA asks for the next word of a text and its log probability under the model.
    """
    if is_encoder_decoder and task in _DECODERS_ALONE:
        raise ConfigError(
            f"{model} is an encoder-decoder (T5), and {task} scores how a decoder continues a text",
            "leave evaluate out: stages=[convert,export,deploy,benchmark]",
        )
