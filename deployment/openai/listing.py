"""What can be asked about the endpoint itself: models, tokens, health, version."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from deployment.openai.body import read_body, required
from deployment.openai.chat import encode_messages
from deployment.openai.errors import ApiError
from deployment.openai.fields import DETOKENIZE, TOKENIZE
from deployment.openai.models import Model
from deployment.openai.service import Service, encode, service_of
from export_scripts.repository.tokenizer_models.slipway_tokenizer import FileTokenizer
from handover.provenance import VERSION


async def list_models(request: web.Request) -> web.Response:
    """Answer ``GET /v1/models``."""
    service = service_of(request)
    models = [_described(service, model, name) for model in service.models.all for name in model.names]
    return web.json_response({"object": "list", "data": models})


async def show_model(request: web.Request) -> web.Response:
    """Answer ``GET /v1/models/{id}``."""
    service, name = service_of(request), request.match_info["id"]
    return web.json_response(_described(service, service.models.find(name), name))


def _described(service: Service, model: Model, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "slipway",
        "root": model.engine,
        "parent": None,
        "max_model_len": model.max_positions,
        "is_encoder_decoder": model.is_encoder_decoder,
        "settings": model.settings,
    }


async def tokenize(request: web.Request) -> web.Response:
    """Answer ``POST /tokenize``: the tokens of a text."""
    values = await read_body(request, TOKENIZE)
    model = service_of(request).models.find(values["model"])
    if values["messages"] is None:
        text = required(values, "prompt")
        # A harness asks in this way for the number of the token that /tokenizer_info has named.
        token = _named_tokens(model).get(text)
        ids = (token,) if token is not None else await encode(model, text, values["add_special_tokens"])
    else:
        ids = await encode_messages(model, values["messages"], values["add_generation_prompt"])
    strings = [model.texts.decode([token]) for token in ids] if values["return_token_strs"] else None
    content = {"count": len(ids), "max_model_len": model.max_positions, "tokens": ids, "token_strs": strings}
    return web.json_response(content)


async def detokenize(request: web.Request) -> web.Response:
    """Answer ``POST /detokenize``: the text of tokens."""
    values = await read_body(request, DETOKENIZE)
    model = service_of(request).models.find(values["model"])
    tokens = required(values, "tokens")
    model.check_ids(tokens, "tokens")
    return web.json_response({"prompt": model.texts.decode(tokens)})


async def tokenizer_info(request: web.Request) -> web.Response:
    """Answer ``GET /tokenizer_info``: what a client needs to tokenize by itself."""
    model = service_of(request).models.find(request.query.get("model"))
    texts = model.texts
    start = texts.decode(texts.ids.before[:1]) if texts.ids.before else None
    end = texts.decode([texts.end_id])
    named = {} if model.chat is None else model.chat.tokens
    content = {
        "tokenizer_class": type(texts.tokenizer).__name__,
        "bos_token": start or named.get("bos_token"),
        "eos_token": end,
        "pad_token": named.get("pad_token", end),
        "eos_token_id": texts.end_id,
        "vocab_size": model.vocab_size,
        "model_max_length": model.max_positions,
        "add_bos_token": bool(texts.ids.before),
        "chat_template": None if model.chat is None else model.chat.source,
    }
    return web.json_response(content)


def _named_tokens(model: Model) -> dict[str, int]:
    """Number the tokens that ``/tokenizer_info`` names."""
    texts = model.texts
    tokens = {texts.decode([token]): token for token in (*texts.ids.before, texts.end_id)}
    if model.chat is None or not isinstance(texts.tokenizer, FileTokenizer):
        return tokens
    special = texts.tokenizer.special
    names = (model.chat.tokens.get(key, "") for key in ("bos_token", "pad_token"))
    return {name: special[name] for name in names if name in special} | tokens


async def health(request: web.Request) -> web.Response:
    """Answer ``GET /health``: whether the models take requests."""
    service = service_of(request)
    if await service.triton.is_ready([model.engine for model in service.models.all]):
        return web.Response()
    raise ApiError("the server behind this endpoint is not ready", "see its log", status=503)


async def version(request: web.Request) -> web.Response:
    """Answer ``GET /version``."""
    return web.json_response({"version": VERSION})
