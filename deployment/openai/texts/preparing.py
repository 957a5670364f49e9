"""From the bytes of a body to what is asked, with its tokens.

The event loop does this for short bodies, the text processes (text_process.py) for all others: no module that is
imported here may need the event loop, HTTP or gRPC.
"""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from deployment.openai.bodies.body import Values, check_fields, parse, required
from deployment.openai.bodies.fields import CHAT, COMPLETIONS, DETOKENIZE, TOKENIZE, Field
from deployment.openai.errors import ApiError
from deployment.openai.texts.offered_models import Model, Models
from deployment.openai.texts.templates import ChatTemplate
from deployment.openai.tools.declared import NONE
from export_scripts.repository.tokenizer_models.slipway_tokenizer import FileTokenizer
from handover.errors import SlipwayError, shortened

_UNLIMITED_TOKENS = 2048
"""Tokens of an answer where neither the client nor the model sets a limit."""


@dataclass(frozen=True)
class Prompt:
    """A prompt as tokens, and its own text.

    Attributes:
        ids: token ids.
        text: where the answer echoes it: as the client gave it, or what its tokens stand for.
        max_tokens: that its answers may have.
    """

    ids: tuple[int, ...]
    text: str
    max_tokens: int

    def pack(self) -> tuple[bytes, str, int]:
        """Return what can be sent to another process quickly."""
        return array("I", self.ids).tobytes(), self.text, self.max_tokens

    @classmethod
    def unpack(cls, ids: bytes, text: str, max_tokens: int) -> Prompt:
        """Read what ``pack`` gave."""
        return cls(tuple(array("I", ids)), text, max_tokens)


def limit_tokens(model: Model, given: int, max_tokens: int | None, name: str) -> int:
    """Return how many tokens an answer may have.

    Args:
        model: that is asked.
        given: tokens of the prompt that is continued.
        max_tokens: that the client asks for; None: as many as the model has positions for.
        name: of the field.

    Raises:
        ApiError: prompt and answer do not fit the model's positions.
    """
    most = model.max_positions
    if most is None:
        return _UNLIMITED_TOKENS if max_tokens is None else max_tokens
    room = most if model.is_encoder_decoder and given <= most else most - given
    wanted = max(1, room) if max_tokens is None else max_tokens
    if wanted > room:
        raise ApiError(
            f"the prompt has {given} tokens and {name} is {wanted}, and the model has {most} positions",
            f"{name} is at most {room} here" if room > 0 else f"the prompt has at most {most - 1} tokens",
            param=name if room > 0 else "prompt",
            code="context_length_exceeded",
        )
    return wanted


def _read_prompts(model: Model, values: Values) -> tuple[Prompt, ...]:
    """Return the prompts of ``/v1/completions`` as tokens; ApiError: one is too long or has a token that is none."""
    return tuple(_prompt(model, values, given) for given in required(values, "prompt"))


def _prompt(model: Model, values: Values, given: str | tuple[int, ...]) -> Prompt:
    if isinstance(given, str):
        model.check_length(given, "prompt")
        ids = model.texts.encode(given)
    else:
        model.check_ids(given, "prompt")
        ids = given
    most = limit_tokens(model, len(ids), values["max_tokens"], "max_tokens")
    if not values["echo"]:
        return Prompt(ids, "", most)
    return Prompt(ids, given if isinstance(given, str) else model.texts.prompt_text(given), most)


def _read_conversation(model: Model, values: Values) -> tuple[Prompt, ...]:
    """Return the conversation of ``/v1/chat/completions`` as tokens."""
    required(values, "messages")
    choice = values["tool_choice"]
    ids = _encode_messages(model, values, True, has_tools=choice is None or choice[0] != NONE)
    if not ids:
        raise ApiError("the chat template makes no token of these messages", "give another message", param="messages")
    name = "max_tokens" if values["max_completion_tokens"] is None else "max_completion_tokens"
    return (Prompt(ids, "", limit_tokens(model, len(ids), values[name], name)),)


def _encode_messages(
    model: Model, values: Values, add_generation_prompt: bool, has_tools: bool = True
) -> tuple[int, ...]:
    """Return the tokens of a conversation.

    Args:
        model: that is asked.
        values: the request's fields.
        add_generation_prompt: whether an answer begins behind it.
        has_tools: whether the model is told of the tools.

    Raises:
        ApiError: the model has no chat template, or it refuses the messages.
    """
    if (template := read_template(model)) is None:
        raise ApiError(
            f"model '{model.names[0]}' has no chat template",
            "ask /v1/completions; or give the endpoint --chat-template=FILE; or convert a checkpoint that has one: "
            "chat_template.jinja or tokenizer_config.json beside its tokenizer, or data.chat_prompt_tokens of NeMo",
            param="messages",
            code="no_chat_template",
        )
    tools = values["tools"] or None if has_tools else None
    further = _template_values(template.variables(tools is not None), values)
    rendered = template.render(values["messages"], add_generation_prompt, tools, values["documents"] or None, further)
    model.check_length(rendered, "messages")
    return template.encode(rendered)


def _template_values(takes: Collection[str], values: Values) -> dict[str, Any]:
    """Return what else the chat template is given; ApiError: it does not take the effort that is asked for."""
    further, effort = dict(values["chat_template_kwargs"] or {}), values["reasoning_effort"]
    if effort is None:
        return further
    if "reasoning_effort" in takes:
        return {"reasoning_effort": effort, **further}
    if effort != "none":
        raise ApiError("this model's chat template takes no reasoning_effort", "leave it out", param="reasoning_effort")
    return {**({"enable_thinking": False} if "enable_thinking" in takes else {}), **further}


def read_template(model: Model) -> ChatTemplate | None:
    """Return what writes a model's conversations; None: it has no chat template. ApiError: it cannot be read."""
    problem = model.chat_problem
    try:
        if not problem:
            return model.template
    except SlipwayError as error:
        problem = error.problem
    except Exception as error:  # Python's compiler has limits of its own, and raises what it likes
        problem = f"the chat template cannot be read: {shortened(f'{type(error).__name__}: {error}')}"
    raise ApiError(problem, "give the endpoint another by --chat-template", param="messages", code="no_chat_template")


def _tokenize(model: Model, values: Values) -> bytes:
    """Write the answer of ``/tokenize``."""
    if values["messages"] is None:
        text = required(values, "prompt")
        # A harness asks in this way for the number of the token that /tokenizer_info has named.
        token = _named_tokens(model).get(text)
        ids = (token,) if token is not None else model.texts.encode(text, values["add_special_tokens"])
    else:
        ids = _encode_messages(model, values, values["add_generation_prompt"])
    strings = [model.texts.decode([token]) for token in ids] if values["return_token_strs"] else None
    content = {"count": len(ids), "max_model_len": model.max_positions, "tokens": ids, "token_strs": strings}
    return json.dumps(content).encode()


def _named_tokens(model: Model) -> dict[str, int]:
    """Number the tokens that ``/tokenizer_info`` names."""
    texts = model.texts
    tokens = {texts.decode([token]): token for token in (*texts.ids.before, texts.end_id)}
    if model.chat is None or not isinstance(texts.tokenizer, FileTokenizer):
        return tokens
    special = texts.tokenizer.special
    names = (model.chat.tokens.get(key, "") for key in ("bos_token", "pad_token"))
    return {name: special[name] for name in names if name in special} | tokens


def _detokenize(model: Model, values: Values) -> bytes:
    """Write the answer of ``/detokenize``."""
    tokens = required(values, "tokens")
    model.check_ids(tokens, "tokens")
    return json.dumps({"prompt": model.texts.decode(tokens)}).encode()


def _count_answers(values: Values) -> int:
    drawn: int = values["n"] if values.get("best_of") is None else values["best_of"]
    return drawn * len(values.get("prompt") or (None,))


class BodyLimits(NamedTuple):
    """What a body may ask for.

    Attributes:
        most_bytes: that it has, compressed or not.
        most_answers: that it asks for.
    """

    most_bytes: int
    most_answers: int


def decompress(content: bytes, encoding: str, most_bytes: int) -> bytes:
    """Undo a Content-Encoding; ApiError: the content is none of it, or too large."""
    if not encoding:
        return content
    try:
        if encoding == "br":
            import brotli  # type: ignore[import-untyped]

            found = bytes(brotli.Decompressor().process(content, output_buffer_limit=most_bytes + 1))
        else:
            found = _inflate(content, encoding, most_bytes + 1)
    except Exception as error:  # each library has its own
        raise ApiError(f"the body is not {encoding}", "leave Content-Encoding out, or send what it says") from error
    if len(found) > most_bytes:
        raise ApiError(f"the body has more than {most_bytes} bytes", "send fewer prompts at a time", status=413)
    return found


def _inflate(content: bytes, encoding: str, most_bytes: int) -> bytes:
    """Undo gzip, or deflate with or without zlib's header, as far as wanted."""
    is_raw = encoding == "deflate" and content[:1] and content[0] & 15 != zlib.DEFLATED
    reader = zlib.decompressobj(31 if encoding == "gzip" else -zlib.MAX_WBITS if is_raw else zlib.MAX_WBITS)
    found = reader.decompress(content, most_bytes)
    if len(found) < most_bytes and not reader.eof:
        raise ValueError("the end is missing")
    return found


@dataclass(frozen=True)
class Kind:
    """One path's way of reading a body.

    Attributes:
        table: the fields of the body.
        work: turns a checked body into prompts, or into the whole answer.
        heavy: fields that the answer does not need any more once the work is done.
        asks: whether answers are generated, whose number is limited.
        has_text_alone: whether there may be no conversation, which a chat template writes.
    """

    table: Mapping[str, Field]
    work: Callable[[Model, Values], tuple[Prompt, ...] | bytes]
    heavy: tuple[str, ...]
    asks: bool = True
    has_text_alone: bool = True


KINDS: Mapping[str, Kind] = {
    "completions": Kind(COMPLETIONS, _read_prompts, ("prompt",)),
    "chat": Kind(CHAT, _read_conversation, ("messages",), has_text_alone=False),
    "tokenize": Kind(TOKENIZE, _tokenize, ("prompt", "messages"), asks=False),
    "detokenize": Kind(DETOKENIZE, _detokenize, ("tokens",), asks=False),
}


def check(kind: Kind, content: bytes, models: Models, most_answers: int) -> tuple[dict[str, Any], Model]:
    """Read a body as far as that is quick, whatever it asks for.

    Args:
        kind: of the path.
        content: of the body.
        models: that are offered.
        most_answers: that one request may ask for.

    Raises:
        ApiError: the request is refused.
    """
    body = parse(content)
    given = body.get("prompt") if isinstance(body, dict) and kind.asks else None
    if isinstance(given, list) and len(given) > most_answers and type(given[0]) is not int:
        raise _too_many(len(given), most_answers)
    values = dict(check_fields(body, kind.table))
    if kind.asks and (answers := _count_answers(values)) > most_answers:
        raise _too_many(answers, most_answers)
    return values, models.find_base(values["model"])


def _too_many(answers: int, most: int) -> ApiError:
    return ApiError(
        f"the request asks for {answers} answers", f"one request has at most {most}: prompts times n", param="n"
    )
