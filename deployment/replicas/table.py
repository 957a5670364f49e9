"""The routers, by the value of ``deployment.router``."""

from __future__ import annotations

from collections.abc import Mapping

from deployment.replicas.haproxy import HAProxy
from deployment.replicas.router import Router
from deployment.replicas.workers import SGLangRouter, VLLMRouter

ROUTERS: Mapping[str, type[Router]] = {router.name: router for router in (HAProxy, SGLangRouter, VLLMRouter)}
