"""From the fields of a request to the tensors of one sequence, named as in FasterTransformer backend's guides."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from deployment.openai.bodies.body import Values
from deployment.openai.bodies.fields import Field
from deployment.openai.bodies.guides import guide_of
from deployment.openai.engine.scores import GENERATED, GIVEN
from deployment.openai.errors import ApiError
from deployment.openai.texts.offered_models import LORA_NAME, Model
from export_scripts.repository.tokenizer_models.slipway_words import encode_word_lists
from ft_format.socket_messages import Array, Scalar
from ft_format.tensors import ARGMAX_NUCLEUS, INPUTS, NO_TOKEN

_SEED_BITS = 2**64
Tensors = dict[str, Array | Scalar]


@dataclass(frozen=True)
class Wanted:
    """Log probabilities that are asked for.

    Attributes:
        top: most probable tokens in the place of each generated token; None: no log probabilities at all.
        prompt_top: the same in the place of each token of the prompt.
    """

    top: int | None = None
    prompt_top: int | None = None

    @property
    def outputs(self) -> tuple[str, ...]:
        """The tensors that hold them."""
        given = () if self.prompt_top is None else GIVEN if self.prompt_top else GIVEN[:1]
        return (() if self.top is None else GENERATED if self.top else GENERATED[:1]) + given


def _wanted(wanted: Wanted) -> dict[str, float]:
    columns: dict[str, float] = {}
    if wanted.top is not None:
        columns |= {"is_return_raw_log_probs": True, "num_top_log_probs": wanted.top}
    if wanted.prompt_top is not None:
        columns |= {"is_return_context_log_probs": True, "num_context_top_log_probs": wanted.prompt_top}
    return columns


def check_offered(values: Values, table: Mapping[str, Field], model: Model) -> None:
    """Refuse fields that ask for something that the served model has no tensor for.

    Raises:
        ApiError: naming the field and the tensor.
    """
    for name, field in table.items():
        if field.is_optional and values[name] != field.default and field.goes_to not in model.inputs:
            check_tensor(model, field.goes_to, name)


def check_tensor(model: Model, tensor: str, name: str) -> None:
    """Refuse a field that the model has no tensor for; ApiError."""
    if tensor not in model.inputs:
        raise ApiError(
            f"{name} is not supported by model '{model.names[0]}': it has no tensor {tensor}",
            "leave the field out, or export the model again and serve it with the drop-in engine",
            param=name,
            code="unsupported_parameter",
        )


def first_seed(values: Values) -> int:
    """Return the seed of a request's first answer: the given one, or a random one as OpenAI's clients expect."""
    return secrets.randbits(64) if values["seed"] is None else values["seed"] % _SEED_BITS


def sequence_tensors(
    values: Values, model: Model, prompt: Sequence[int], max_tokens: int, seed: int, wanted: Wanted
) -> Tensors:
    """Build the tensors of one sequence, [1, n] each.

    Args:
        values: the request's fields, checked.
        model: that is asked.
        prompt: token ids, at least one.
        max_tokens: to generate at most.
        seed: of this answer.
        wanted: log probabilities.
    """
    lengths = (
        ("sequence_length", "max_output_len") if model.is_encoder_decoder else ("input_lengths", "request_output_len")
    )
    columns = {
        lengths[0]: len(prompt),
        lengths[1]: max_tokens,
        "end_id": NO_TOKEN if values["ignore_eos"] else model.texts.end_id,
        "random_seed": seed % _SEED_BITS,
        **_wanted(wanted),
        **_sampling(values),
    }
    tensors: Tensors = {"input_ids": np.array([prompt], np.uint32)}
    tensors |= {name: Scalar(value, INPUTS[name].kind) for name, value in columns.items()}
    if model.adapter:
        tensors[LORA_NAME] = np.array([[model.adapter.encode()]], object)
    return tensors | _stop_tensors(values, model) | _bias_tensors(values) | _guide_tensors(values)


def _stop_tensors(values: Values, model: Model) -> Tensors:
    """Name the tokens that end an answer beside end_id; as stop words they count before ``min_length`` too."""
    own = () if values["ignore_eos"] else model.texts.ids.more_end_ids
    stops = sorted({*own, *values["stop_token_ids"]})
    if not stops:
        return {}
    if "stop_token_ids" in model.inputs:
        return {"stop_token_ids": np.array([stops], np.int32)}
    return {"stop_words_list": encode_word_lists(model.texts.tokenizer, [""], stops)}


def _bias_tensors(values: Values) -> Tensors:
    if not values["logit_bias"]:
        return {}
    ids, biases = zip(*values["logit_bias"], strict=True)
    return {"logit_bias_ids": np.array([ids], np.int32), "logit_bias_values": np.array([biases], np.float32)}


def _guide_tensors(values: Values) -> Tensors:
    if not (guide := guide_of(values)):
        return {}
    names = "guided_decoding_guide_type", "guided_decoding_guide"
    return {name: np.array([[text.encode()]], object) for name, text in zip(names, guide, strict=True)}


def _sampling(values: Values) -> dict[str, float]:
    """Choose how tokens are drawn; a temperature of 0 is greedy, as is the top 1."""
    wanted = {
        "repetition_penalty": values["repetition_penalty"],
        "output_presence_penalty": values["presence_penalty"],
        "frequency_penalty": values["frequency_penalty"],
        "min_p": values["min_p"],
        "min_length": values["min_tokens"],
        "beam_width": values["beam_width"],
    }
    given = {name: value for name, value in wanted.items() if value != INPUTS[name].default}
    top_k = max(0, values["top_k"])
    if values["temperature"] == 0 or top_k == 1 or "beam_width" in given:
        return {"runtime_top_k": 0, "runtime_top_p": ARGMAX_NUCLEUS, **given}
    return {"runtime_top_k": top_k, "runtime_top_p": values["top_p"], "temperature": values["temperature"], **given}
