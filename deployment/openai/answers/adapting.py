"""``POST /v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, with vLLM's bodies and answers."""

from __future__ import annotations

from aiohttp import web

from deployment.openai.answers.reading import read_json
from deployment.openai.errors import ApiError
from deployment.openai.service import service_of
from deployment.openai.values import object_of, text

LOAD_PATH, UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


async def load_adapter(request: web.Request) -> web.Response:
    """Load an adapter from a directory of the server's host."""
    given = object_of(await read_json(request), "the body", ("lora_name", "lora_path"))
    name, path = (text(given.get(key), key) for key in ("lora_name", "lora_path"))
    service = service_of(request)
    await service.adapters.load(name, path, service.models)
    return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")


async def unload_adapter(request: web.Request) -> web.Response:
    """Unload an adapter; requests that have it end well."""
    given = object_of(await read_json(request), "the body", ("lora_name", "lora_int_id"))
    if "lora_int_id" in given:
        raise ApiError("lora_int_id is not supported", "give lora_name alone", param="lora_int_id")
    name, service = text(given.get("lora_name"), "lora_name"), service_of(request)
    await service.adapters.unload(name, service.models)
    return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")
