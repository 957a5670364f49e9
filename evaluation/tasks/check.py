"""What can be said about a task before a model is asked. The login side imports this: no numpy, no client."""

from __future__ import annotations

from handover.errors import ConfigError

_SCORING = ("lambada",)


def check_task(task: str, model: str, is_encoder_decoder: bool, can_score_answers: bool) -> None:
    """Refuse to score a model whose answers the task cannot be computed from.

    Args:
        task: name of the task.
        model: what is scored, for the message.
        is_encoder_decoder: the model is a T5.
        can_score_answers: it then scores tokens that its decoder is made to begin with.

    Raises:
        ConfigError: LAMBADA asks for the log probability of the last word of a text, which FasterTransformer's T5 does
            not tell.
    """
    if is_encoder_decoder and task in _SCORING and not can_score_answers:
        raise ConfigError(
            f"{model} is an encoder-decoder (T5), and {task} scores given words, which needs decoder_input_ids",
            "serve it with the drop-in engine (deployment.engine=slipway, exported by this version), or leave"
            " evaluate out: stages=[convert,export,deploy,benchmark]",
        )
