"""Checks of a task before any request is sent. The login node imports this module: no numpy, no client."""

from __future__ import annotations

from handover.errors import ConfigError


def check_scores(task: str, model: str, is_encoder_decoder: bool, can_score_answers: bool) -> None:
    """Refuse a model whose answers do not contain what a task needs that scores given words.

    Args:
        task: name of the task.
        model: name of the model for the message.
        is_encoder_decoder: whether the model is a T5.
        can_score_answers: whether the model scores tokens that are given to its decoder.

    Raises:
        ConfigError: LAMBADA needs the log probability of the last word of a text, which FasterTransformer's T5 does
            not return, and no OpenAI API either.
    """
    if is_encoder_decoder and not can_score_answers:
        raise ConfigError(
            f"{model} is an encoder-decoder (T5), and {task} scores given words, which needs decoder_input_ids",
            "serve it with the drop-in engine (deployment.engine=slipway, exported by this version) and ask it by gRPC,"
            " as host:port, or leave evaluate out: stages=[convert,export,deploy,benchmark]",
        )
