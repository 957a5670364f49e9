"""The LoRA adapters of the model behind the endpoint: clients ask for one by its name as for a model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace

from deployment.openai.engine.triton import Triton
from deployment.openai.errors import ApiError
from deployment.openai.texts.offered_models import Model, Models
from ft_format.socket_messages import LIST, LOAD, UNLOAD, AdapterWish
from handover.errors import shortened
from models.peft import check_name

_FRESH_S = 1.0
"""For so long what the engine has said of its adapters is not asked again."""


class ServedAdapters:
    """The adapters of the one model that takes some; other processes of the endpoint may change them too."""

    def __init__(self, triton: Triton) -> None:
        self._triton, self._paths, self._asked_s = triton, dict[str, str](), 0.0
        self._models = dict[str, Model]()
        self._asking = asyncio.Lock()

    async def paths(self, models: Models) -> Mapping[str, str]:
        """Return the directories of all adapters by name."""
        if models.adapted is not None:
            async with self._asking:  # who comes meanwhile waits for the same answer
                if time.monotonic() - self._asked_s > _FRESH_S:
                    await self._wish(models.adapted, AdapterWish(LIST))
                    self._asked_s = time.monotonic()
        return self._paths

    async def resolve(self, model: Model, name: str | None, models: Models) -> Model:
        """Return what a request asks for: the model itself, or the model with the adapter of that name.

        Raises:
            ApiError: there is neither.
        """
        if name is None or name in models.names:
            return model
        if name not in await self.paths(models):
            raise models.unknown(name, self._paths)
        if name not in self._models:
            self._models[name] = replace(model, names=(name,), adapter=name)
        return self._models[name]

    async def load(self, name: str, path: str, models: Models) -> None:
        """Load an adapter from a directory of the server's host; ApiError: it is refused."""
        check_name(name, lambda problem, hint: ApiError(problem, hint, param="lora_name"))
        if name in models.names:
            raise ApiError(f"there is a model called '{name}'", "give the adapter another name", param="lora_name")
        if not path.startswith("/"):
            raise ApiError(f"lora_path is '{shortened(path, 80)}'", "give the whole path", param="lora_path")
        if await self._wish(self._base(models), AdapterWish(LOAD, name, path)) is None:
            raise _no_socket()

    async def unload(self, name: str, models: Models) -> None:
        """Unload an adapter; ApiError: there is none of that name."""
        base = self._base(models)
        if name not in await self.paths(models):
            raise models.unknown(name, self._paths, "lora_name")
        if await self._wish(base, AdapterWish(UNLOAD, name)) is None:
            raise _no_socket()

    def _base(self, models: Models) -> Model:
        if models.adapted is None:
            raise ApiError("no model here takes adapters", "export one again, and serve it with the drop-in engine")
        return models.adapted

    async def _wish(self, base: Model, wish: AdapterWish) -> Mapping[str, str] | None:
        """Ask for a change; returns the adapters that there are then, None where the engine has no socket here."""
        found = await self._triton.change_adapters(base.engine, wish)
        if found is None:
            self._paths = dict(base.adapters)
            return None
        self._paths = {name: str(each["path"]) for name, each in found.items()}
        self._models = {name: each for name, each in self._models.items() if name in found}
        return self._paths


def _no_socket() -> ApiError:
    return ApiError(
        "adapters are loaded through the socket of the drop-in engine, and there is none on this host",
        "run the endpoint beside the engine",
        status=501,
    )
