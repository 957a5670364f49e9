"""Every field of a request's body: its type, its range and where it goes. This is the one place that lists them.

``docs/openai.md`` has a row for each; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deployment.openai.bodies import guides
from deployment.openai.tools.declared import read_choice, read_tools
from deployment.openai.values import (
    boolean,
    documents,
    integer,
    messages,
    number,
    prompts,
    stop_words,
    stream_options,
    template_values,
    text,
    token_biases,
    token_ids,
    top_candidates,
)
from ft_format.tensors import INPUTS
from handover.ranges import SEED, TOKENS
from models.checks import Range

Reader = Callable[[Any, str], Any]
"""Takes a value as JSON brought it and the field's name; returns it checked, or raises an ApiError."""

ENDPOINT = "the endpoint"
"""Where a field goes that no tensor stands for."""
UNUSED = "nowhere: it is accepted and has no effect"

_GUIDE = "guided_decoding_guide_type"
_CHOICES = Range(1, 128)
_TOP = INPUTS["num_top_log_probs"].legal
_TEMPERATURE = Range(0, 2)
_NUCLEUS = Range(0, 1, is_above=True)
_SHARE = INPUTS["min_p"].legal
_PENALTY = Range(-2, 2)
_FACTOR = Range(0, 100, is_above=True)
_TOP_K = Range(-1, SEED.most)
_SEEDS = Range(-(2**63), 2**64 - 1)
_NEW_TOKENS = Range(0, TOKENS.most)
_BEAMS = Range(1, INPUTS["beam_width"].legal.most)


@dataclass(frozen=True)
class Field:
    """One field of a body.

    Attributes:
        read: checks its value.
        kind: its type and range, in words.
        default: where it is not given, or null.
        goes_to: the engine's tensor, or ``ENDPOINT`` or ``UNUSED``.
        is_optional: whether a model may lack the tensor; a value other than the default is refused then.
    """

    read: Reader
    kind: str
    default: Any = None
    goes_to: str = ENDPOINT
    is_optional: bool = False


def _integer(allowed: Range, default: int | None = None, goes_to: str = ENDPOINT, is_optional: bool = False) -> Field:
    return Field(integer(allowed), f"whole number, {allowed}", default, goes_to, is_optional)


def _number(allowed: Range, default: float, goes_to: str, is_optional: bool = False) -> Field:
    return Field(number(allowed), f"number, {allowed}", default, goes_to, is_optional)


def _boolean(goes_to: str = ENDPOINT) -> Field:
    return Field(boolean, "true or false", False, goes_to)


def _guide(read: Reader, kind: str) -> Field:
    return Field(read, kind, None, _GUIDE, is_optional=True)


_COMMON: Mapping[str, Field] = {
    "model": Field(text, "text"),
    "stream": _boolean(),
    "stream_options": Field(stream_options, "object with include_usage", False),
    "n": _integer(_CHOICES, 1),
    "temperature": _number(_TEMPERATURE, 1.0, "temperature"),
    "top_p": _number(_NUCLEUS, 1.0, "runtime_top_p"),
    "top_k": _integer(_TOP_K, 0, "runtime_top_k"),
    "min_p": _number(_SHARE, 0.0, "min_p", is_optional=True),
    "seed": _integer(_SEEDS, None, "random_seed"),
    "stop": Field(stop_words, "text, or a list of at most 64 texts, none of them empty", ()),
    "stop_token_ids": Field(token_ids, "list of token ids", (), "stop_token_ids, or stop_words_list without it"),
    "min_tokens": _integer(_NEW_TOKENS, 0, "min_length", is_optional=True),
    "ignore_eos": _boolean("end_id"),
    "presence_penalty": _number(_PENALTY, 0.0, "output_presence_penalty", is_optional=True),
    "frequency_penalty": _number(_PENALTY, 0.0, "frequency_penalty", is_optional=True),
    "repetition_penalty": _number(_FACTOR, 1.0, "repetition_penalty"),
    "logit_bias": Field(
        token_biases, "object of token id to a number, at least -100 and at most 100", (), "logit_bias_ids", True
    ),
    "response_format": _guide(guides.response_format, "object with type text, json_object or json_schema"),
    "structured_outputs": _guide(
        guides.structured_outputs, "object with one of json, json_object, regex, choice, grammar"
    ),
    "guided_json": _guide(guides.json_schema, "JSON schema, an object or its text"),
    "guided_regex": _guide(guides.regex, "regular expression"),
    "guided_choice": _guide(guides.choice, "list of 1 to 10000 texts"),
    "guided_grammar": _guide(guides.grammar, "grammar in GBNF or Lark's form"),
    "beam_width": _integer(_BEAMS, 1, "beam_width"),
    "return_token_ids": _boolean(),
    **dict.fromkeys(("user", "prompt_cache_key", "safety_identifier"), Field(text, "text", "", UNUSED)),
}
COMPLETIONS: Mapping[str, Field] = {
    "prompt": Field(prompts, "text, list of texts, list of token ids, or list of lists of token ids"),
    "max_tokens": _integer(_NEW_TOKENS, 16, "request_output_len"),
    "best_of": _integer(_CHOICES, None, "is_return_raw_log_probs"),
    "echo": _boolean(),
    "logprobs": Field(top_candidates(_TOP), f"whole number, {_TOP}", None, "num_top_log_probs", True),
    "return_tokens_as_token_ids": _boolean(),
    **_COMMON,
}
"""The body of ``/v1/completions``."""
CHAT: Mapping[str, Field] = {
    "messages": Field(messages, "list of objects with role and content, which is text or a list of text parts"),
    "tools": Field(read_tools, "list of at most 128 tools of type function", (), _GUIDE, True),
    "tool_choice": Field(read_choice, "none, auto, required, or an object that names a function"),
    "parallel_tool_calls": Field(boolean, "true or false", True),
    "documents": Field(documents, "list of objects", ()),
    "chat_template_kwargs": Field(template_values, "object of what else the chat template takes"),
    "reasoning_effort": Field(text, "text that the chat template knows"),
    "include_reasoning": Field(boolean, "true or false", True),
    "max_tokens": _integer(TOKENS, None, "request_output_len"),
    "max_completion_tokens": _integer(TOKENS, None, "request_output_len"),
    "logprobs": Field(boolean, "true or false", False, "is_return_raw_log_probs", True),
    "top_logprobs": _integer(_TOP, None, "num_top_log_probs", is_optional=True),
    **_COMMON,
}
"""The body of ``/v1/chat/completions``."""
TOKENIZE: Mapping[str, Field] = {
    "model": Field(text, "text"),
    "prompt": Field(text, "text"),
    **{name: CHAT[name] for name in ("messages", "tools", "documents", "chat_template_kwargs", "reasoning_effort")},
    "add_special_tokens": Field(boolean, "true or false", True),
    "add_generation_prompt": Field(boolean, "true or false", True),
    "return_token_strs": _boolean(),
}
"""The body of ``/tokenize``."""
DETOKENIZE: Mapping[str, Field] = {"model": Field(text, "text"), "tokens": Field(token_ids, "list of token ids")}
"""The body of ``/detokenize``."""

_OF_CONVERSATIONS = "give it to /v1/chat/completions"
_FUNCTIONS = "give tools and tool_choice, which have taken the place of functions"
_TEXT_ONLY = "the models take and give text alone"
_SPECIAL = "an answer has the text of every token but those that end it"
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("functions", "function_call"), _FUNCTIONS),
    **dict.fromkeys(("tools", "tool_choice", "parallel_tool_calls", "documents"), _OF_CONVERSATIONS),
    **dict.fromkeys(("chat_template_kwargs", "reasoning_effort", "include_reasoning"), _OF_CONVERSATIONS),
    **dict.fromkeys(("audio", "modalities", "mm_processor_kwargs", "prediction", "web_search_options"), _TEXT_ONLY),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"), _SPECIAL),
    "suffix": "the models continue a prompt; none of them fills a gap",
    "use_beam_search": "give beam_width, the number of beams",
    "length_penalty": "beams are asked for by beam_width; their length penalty is fixed",
    "bad_words": "give logit_bias with -100 for each token that must not come",
    "prompt_logprobs": "give echo with logprobs, to /v1/completions",
    "truncate_prompt_tokens": "shorten the prompt; /tokenize says how many tokens it has",
    "store": "/v1/responses keeps its answers where they are asked to be kept",
    "metadata": "it belongs to stored answers; X-Request-Id names a request in the logs",
    "service_tier": "there is one",
    "verbosity": "say in the prompt how long an answer should be",
    "priority": "requests are served as they come, those of one moment by the largest max_tokens first",
}
"""Fields of OpenAI or vLLM that are refused where no table has them: name and what to do instead."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "function_call": ("none",),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True,),
    "include_reasoning": (True,),
    "reasoning_effort": ("none",),
    "modalities": (["text"],),
    "suffix": ("",),
    "length_penalty": (1, 1.0),
    "priority": (0,),
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
}
"""Values with which a refused field asks for what is so anyhow, beside those that ask for nothing of any."""
