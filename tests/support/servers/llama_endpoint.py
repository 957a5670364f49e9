"""The OpenAI endpoint of a real deployment of the demonstration's Llama, and what its engine has counted."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

from export_scripts.arguments import ConvertArguments, ExportArguments
from export_scripts.convert import convert
from export_scripts.repository.model_repository import build_repository
from support.servers.served import Deployment

LLAMA = Path(__file__).resolve().parents[3] / "examples" / "llama_demo" / "checkpoints"
MODEL = "llama"
TEMPLATE = "{% for each in messages %}{{ each.content }}{% endfor %}"
TOOLS_TEMPLATE = """{%- if tools %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}
{%- for m in messages %}{{ m.role }}: {{ m.content or '' }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}
{% endfor %}{% if add_generation_prompt %}assistant: <think>
{% if not enable_thinking %}</think>
{% endif %}{% endif %}"""
"""Writes tools and calls in the form of Hermes, and begins thoughts, or ends them where they are not wanted."""
COUNTED = ("request_success_total", "generation_tokens_total", "prompt_tokens_total")


@dataclass(frozen=True)
class LlamaEndpoint:
    """The address of the endpoint, without /v1."""

    url: str

    def counts(self) -> dict[str, float]:
        """Requests and tokens that the engine has counted, which it publishes a few times a second."""
        found = self._published()
        while True:
            time.sleep(0.5)
            before, found = found, self._published()
            if found == before:
                return found

    def _published(self) -> dict[str, float]:
        with urlopen(f"{self.url}/metrics", timeout=180) as page:
            text = page.read().decode()
        found: dict[str, float] = {}
        for name, value in re.findall(rf"^vllm:({'|'.join(COUNTED)})(?:{{.*}})? (\S+)$", text, re.MULTILINE):
            found[name] = found.get(name, 0) + float(value)
        return found


@contextmanager
def llama_endpoint(directory: Path, chat_template: str = TEMPLATE) -> Iterator[LlamaEndpoint]:
    """Serve the Llama in fp32; its chat template gives the messages' texts unless it is given another."""
    convert(ConvertArguments(LLAMA, directory / "1-gpu", 1, "fp32"))
    repository, template = directory / "model_repo", directory / "chat.jinja"
    build_repository(
        ExportArguments(directory / "1-gpu", repository, MODEL, 1, 1, "fp32", 0, 0, max_batch_size=8, decoupled=True)
    )
    template.write_text(chat_template)
    deployment = Deployment(repository, directory / "run", openai_port=0, openai_chat_template=template)
    published = deployment.wait_until_published()
    yield LlamaEndpoint(f"http://127.0.0.1:{published.openai_port}")
    deployment.begin_to_stop()
