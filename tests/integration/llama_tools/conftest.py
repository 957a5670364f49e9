"""One server for all tests of this directory, which only ask: the demonstration's Llama with a template for tools."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from support.servers.llama_endpoint import TOOLS_TEMPLATE, llama_endpoint


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with llama_endpoint(tmp_path_factory.mktemp("llama_tools"), TOOLS_TEMPLATE) as endpoint:
        yield endpoint.url


@pytest.fixture(scope="session")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
