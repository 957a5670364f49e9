"""Chat templates and long texts are read in processes with limits, which end with the endpoint and are replaced."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp.test_utils import TestClient
from support.servers.fake_triton import FakeTriton, count_up
from support.servers.openai_endpoint import application_of
from support.servers.served import wait_for

from deployment.openai.errors import ApiError
from deployment.openai.texts import text_pool
from deployment.openai.texts.offered_models import Model, Models
from deployment.openai.texts.preparing import BodyLimits, Prompt
from deployment.openai.texts.text_pool import TextPool
from deployment.openai.texts.text_process import LANES
from deployment.openai.texts.texts import load_texts
from deployment.processes.heartbeat import Heartbeat, ending
from deployment.processes.linux import command_line, descendants, look_up
from handover.chat import Chat

INPUTS = ("input_ids", "input_lengths", "request_output_len", "stop_words_list")
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATE = (
    f"{{% if messages[0].content == 'loop' %}}{LOOP}{{% endif %}}"
    "{% if messages[0].content == 'grow' %}{% set n = 99999999 * messages|length %}{{ 'a' * (40 * n) }}{% endif %}"
    "{% for each in messages %}{{ each.content }}{% endfor %}"
)


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("letters")
    vocabulary = {**{chr(33 + number): number for number in range(90)}, "a" * 300: 90}
    (directory / "vocab.json").write_text(json.dumps(vocabulary))
    (directory / "merges.txt").write_text("#version: 0.2\n")
    return directory


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTriton]:
    monkeypatch.setattr(text_pool, "LANES", tuple(replace(each, cpu_s=1) for each in LANES))
    with FakeTriton(count_up, INPUTS) as running:
        yield running


def run(
    fake: FakeTriton, letters: Path, directory: Path, ask: Callable[[TestClient[Any, Any]], Awaitable[None]]
) -> None:
    (directory / "chat.jinja").write_text(TEMPLATE)

    async def inside() -> None:
        async with application_of(fake.url, letters, chat_template=directory / "chat.jinja") as client:
            await ask(client)

    asyncio.run(inside())


async def chat(client: TestClient[Any, Any], text: str) -> tuple[int, Any]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
    async with client.post("/v1/chat/completions", json=body) as answer:
        return answer.status, await answer.json()


def text_processes() -> list[int]:
    """Return those of this process; servers that other tests have started have their own."""
    own = {"deployment.openai.texts.text_process", f"--parent={os.getpid()}"}
    return [each.pid for each in descendants([os.getpid()]) if own <= {*command_line(each.pid)}]


def has_ended(pid: int) -> bool:
    """Whether a process has closed its files, which the kernel does after it has given up its memory."""
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_template_that_loops_or_grows_ends_with_its_request(fake: FakeTriton, letters: Path, tmp_path: Path) -> None:
    async def ask(client: TestClient[Any, Any]) -> None:
        looping = asyncio.create_task(chat(client, "loop"))
        await asyncio.sleep(0.3)
        status, found = await chat(client, "AB")  # another request is not held up by it, nor is the event loop
        assert (status, found["choices"][0]["message"]["content"]) == (200, "CD") and not looping.done()
        for status, found in (await looping, await chat(client, "grow")):
            assert status == 400 and "more memory than one request may" in found["error"]["message"]

    run(fake, letters, tmp_path, ask)
    wait_for(lambda: not text_processes())  # forks end by a signal, soon after what they are forks of


def test_a_process_that_dies_is_replaced_and_its_client_told(fake: FakeTriton, letters: Path, tmp_path: Path) -> None:
    async def ask(client: TestClient[Any, Any]) -> None:
        assert (await chat(client, "AB"))[0] == 200
        parent, reader = text_processes()
        looping = asyncio.create_task(chat(client, "loop"))
        await asyncio.sleep(0.2)
        os.kill(reader, signal.SIGKILL)
        status, found = await looping
        assert status == 500 and "has ended" in found["error"]["message"]
        assert (await chat(client, "AB"))[0] == 200
        idle = text_processes()[1]
        os.kill(idle, signal.SIGKILL)
        wait_for(lambda: has_ended(idle))
        assert (await chat(client, "AB"))[0] == 200
        below = text_processes()
        os.kill(parent, signal.SIGKILL)  # and with it all that it has forked
        wait_for(lambda: all(map(has_ended, below)))
        assert (await chat(client, "AB"))[0] == 200

    run(fake, letters, tmp_path, ask)


def test_texts_count_among_the_requests_that_are_answered(letters: Path, tmp_path: Path, fake: FakeTriton) -> None:
    (tmp_path / "chat.jinja").write_text(TEMPLATE)

    async def inside() -> None:
        settings = {"chat_template": tmp_path / "chat.jinja", "max_requests": 1}
        async with application_of(fake.url, letters, **settings) as client:
            looping = asyncio.create_task(chat(client, "loop"))
            await asyncio.sleep(0.2)
            for path, body in (("/tokenize", {"prompt": "A"}), ("/detokenize", {"tokens": [1]})):
                async with client.post(path, json=body) as answer:
                    assert answer.status == 429
            looping.cancel()

    asyncio.run(inside())


def model_of(letters: Path, template: str = "") -> Model:
    texts, inputs = load_texts(letters, 0, 1, False), frozenset(INPUTS)
    chat = Chat(template) if template else None
    return Model(("m",), "m", inputs, frozenset(), 4, 91, False, 1, True, texts, chat)


@pytest.mark.parametrize(
    "template", ["{% for a in b %}" * 25 + "{% endfor %}" * 25, "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"]
)
def test_a_template_that_cannot_be_compiled_refuses_conversations_alone(letters: Path, template: str) -> None:
    async def inside() -> None:
        pool = TextPool(Models([model_of(letters, template)]), BodyLimits(1 << 20, 4))
        (model,) = (await pool.check_templates()).all
        assert "the chat template" in model.chat_problem
        with pytest.raises(ApiError, match="the chat template.* cannot be (read|used)"):
            await pool.read("chat", b'{"messages": [{"role": "user", "content": "x"}]}')
        values, _, prompts = await pool.read("completions", b'{"prompt": "AB", "max_tokens": 2}')
        assert values["prompt"] is None and prompts == (Prompt((32, 33), "", 2),)
        await pool.close()

    asyncio.run(inside())


def test_a_text_is_refused_by_length_only_where_it_can_have_no_fewer_tokens(letters: Path) -> None:
    """A model of 4 positions, whose longest token has 300 characters."""
    model = model_of(letters)
    model.check_length("a" * 1200, "prompt")
    with pytest.raises(ApiError, match="(?s)prompt has 1201 bytes.* at most 1200 bytes"):
        model.check_length("a" * 1201, "prompt")


BEATING = """import asyncio, time
from deployment.processes.heartbeat import Beating
async def main():
    asyncio.create_task(Beating().go_on())
    await asyncio.sleep(0.2)
    print(1, flush=True)
    {then}
asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["stopped", "busy", "well"])
def test_a_process_that_stands_still_is_killed(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployment.processes.heartbeat.STOPPED_S", 1.5)
    code = BEATING.format(then="time.sleep(60)" if how == "busy" else "await asyncio.sleep(60)")
    heartbeat = Heartbeat()
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE,
        env={**os.environ, **heartbeat.variables}, pass_fds=heartbeat.files,
    )  # fmt: skip
    heartbeat.has_begun()
    assert process.stdout is not None and process.stdout.readline()
    if how == "stopped":
        process.send_signal(signal.SIGSTOP)
    found, started = "", time.monotonic()
    while not found and time.monotonic() < started + 4:
        found = ending(process, heartbeat)
        time.sleep(0.1)
    assert found == ("" if how == "well" else "stood still for 1.5 s and was killed")
    assert (look_up(process.pid) is not None) == (how == "well")
    process.kill()
    process.wait()
    process.stdout.close()
    heartbeat.close()
