"""Grammars that would end, block or fill the server: each fails its own request, while others are answered."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.engines.asking import CPU, ask, generated
from support.tiny_models.guided_model import END, guided, guided_gpt2, submit, texts

from backends.fastertransformer.engine import compiling
from backends.fastertransformer.engine.engine import Engine, open_engine
from backends.fastertransformer.engine.grammar import guided_row, library
from backends.fastertransformer.engine.grammar.compiled import Grammars
from backends.fastertransformer.engine.grammar.trials import Trials
from backends.fastertransformer.engine.rows.answer import Failure

WAIT_S = 60
PROJECT = Path(__file__).resolve().parents[2]
Schema = dict[str, Any]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    opened = open_engine(guided_gpt2(tmp_path_factory.mktemp("hostile")), CPU)
    yield opened
    opened.close()


def canary(engine: Engine) -> None:
    plain = engine.generate([engine.parse(ask([[5, 6, 7]], 3, end_id=END))])[0]
    assert len(generated(plain, 0)) == 3
    assert texts(engine.generate([engine.parse(guided(["choice"], ['["yes"]']))])[0]) == [b"yes"]


def chain(links: int, link: Any, last: Schema) -> str:
    """Write a schema of links, each of which refers to the next."""
    named: Schema = {str(at): link({"$ref": f"#/$defs/{at + 1}"}) for at in range(links)}
    return json.dumps({"$ref": "#/$defs/0", "$defs": {**named, str(links): last}})


def rules(name: str, links: int) -> str:
    return (
        f"start: {name}0\n"
        + "\n".join(f'{name}{at}: "a" {name}{at + 1}' for at in range(links))
        + f'\n{name}{links}: "b"'
    )


def divisors(*numbers: int) -> str:
    """Write a schema of numbers that all of these divide: it compiles for ever, and takes ever more memory."""
    return json.dumps({"allOf": [{"type": "integer", "multipleOf": number} for number in numbers]})


CHAINS = {
    "$ref": ("json_schema", chain(3000, lambda to: to, {})),
    "anyOf": ("json_schema", chain(2000, lambda to: {"anyOf": [to, {"type": "null"}]}, {})),
    "allOf": ("json_schema", chain(3000, lambda to: {"allOf": [to]}, {})),
    "rules": ("ebnf_grammar", rules("r", 6000)),
    "terminals": ("ebnf_grammar", rules("T", 6000)),
}
HOSTILE = {
    **CHAINS,
    "common multiples": ("json_schema", divisors(9973, 9967, 9949, 9941)),
    "many optional properties": ("json_schema", json.dumps({"properties": {f"p{at}": {} for at in range(15_000)}})),
    "a long text": ("regex", "a" * 250_000),
    "nested repetitions": ("regex", "(a?){5000}a{5000}"),
    "many properties at a time": (
        "json_schema",
        json.dumps({"type": "object", "properties": {f"p{at}": {} for at in range(2400)}}),
    ),
}
WORDS = ("takes more than 1 s of processor time|grow too large|too much may follow|one token takes|larger than can be",)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_fails_its_own_request_while_others_are_answered(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    kind, text = HOSTILE[name]
    answers = submit(engine, kind, text)
    canary(engine)
    found = answers.get(timeout=WAIT_S)
    assert isinstance(found, Failure) and found.code == "INVALID_ARG", found
    assert re.search(*WORDS, found.problem or ""), found.problem
    assert not re.search(r"panic|backtrace|llguidance|/\w+/|lexer|symb|python", f"{found.problem} {found.logged}", re.I)
    canary(engine)
    monkeypatch.setattr(Trials, "run", None)  # it is known now
    assert submit(engine, kind, text).get(timeout=WAIT_S).problem == found.problem


HONOURED = {
    "a chain": ("json_schema", chain(500, lambda to: to, {"const": 7})),
    "a chain of rules": (
        "ebnf_grammar",
        "start: r0\n" + "\n".join(f"r{at}: r{at + 1}" for at in range(500)) + '\nr500: "b"',
    ),
    "many states": ("regex", "(a|b)*a(a|b){20}"),
    "a million items": ("json_schema", '{"type": "array", "items": {"type": "integer"}, "maxItems": 1000000}'),
    "a million characters": ("json_schema", '{"type": "string", "minLength": 1000000}'),
    "many values": ("json_schema", json.dumps({"enum": [f"value {at}" for at in range(12_000)]})),
    "many alternatives": ("ebnf_grammar", "root ::= " + " | ".join(f'"choice {at}"' for at in range(2500))),
}


@pytest.mark.parametrize("name", HONOURED)
def test_a_large_grammar_within_the_limits_is_honoured(engine: Engine, name: str) -> None:
    found = submit(engine, *HONOURED[name]).get(timeout=WAIT_S)
    assert not isinstance(found, Failure), found


def test_a_request_whose_client_has_gone_is_not_tried_and_one_that_waits_too_long_is_told(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun_s = time.monotonic()
    gone = submit(engine, "json_schema", divisors(9973, 9967), is_cancelled=lambda: True)
    assert gone.get(timeout=WAIT_S).code == "CANCELLED"
    monkeypatch.setattr(compiling, "_MOST_S", 0.0)
    late = submit(engine, "json_schema", divisors(9941, 9949)).get(timeout=WAIT_S)
    assert late.code == "UNAVAILABLE" and "send it again later" in (late.problem or "")
    monkeypatch.setattr(compiling, "_MOST_WAITING", 0)
    assert submit(engine, "regex", "never seen").get(timeout=WAIT_S).code == "UNAVAILABLE"
    assert time.monotonic() - begun_s < 20
    monkeypatch.undo()
    canary(engine)


def living_in_group(group: int) -> list[str]:
    """Give what /proc says of a group's processes; those that only their parent has not noticed are left out."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            state, _, of = file.read_text().rpartition(")")[2].split()[:3]
            found += [file.read_text()] if int(of) == group and state != "Z" else []
    return found


def test_closing_ends_what_is_tried_at_once(tmp_path: Path) -> None:
    engine = open_engine(guided_gpt2(tmp_path), CPU)
    canary(engine)
    process = engine._grammars._trials._process
    answers = [submit(engine, "json_schema", divisors(9973, 9967, other)) for other in (9949, 9941, 9931)]
    time.sleep(0.1)
    engine.close()
    assert [each.get(timeout=WAIT_S).problem for each in answers] == ["the engine was closed"] * 3
    assert process and process.poll() == -signal.SIGKILL
    assert not living_in_group(process.pid)


def test_a_process_of_trials_that_ends_is_replaced(engine: Engine) -> None:
    canary(engine)
    process = engine._grammars._trials._process
    assert process
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    found = submit(engine, "choice", '["after it"]').get(timeout=WAIT_S)
    assert found.tensors and texts(found.tensors) == [b"after it"]
    assert engine._grammars._trials._process is not process


@pytest.mark.parametrize("limit", ["_SLOW_S", "_SLOW_STEP_S"])
def test_rows_that_take_long_for_each_token_fail_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(guided_row, limit, -1.0)
    monkeypatch.setattr(guided_row, "_MOST_SLOW_S", 0.0)
    answers = submit(engine, "regex", "[a-z]{40}")
    plain = engine.generate([engine.parse(ask([[5, 6, 7]], 20, end_id=END))])[0]
    assert len(generated(plain, 0)) == 20
    found = answers.get(timeout=WAIT_S)
    assert found.code == "INVALID_ARG" and "its tokens take too long to find" in (found.problem or "")


def test_what_the_log_says_of_a_grammar_has_nothing_of_its_text(engine: Engine) -> None:
    for kind, text in (("json_schema", '{"type": "secret"}'), ("regex", "(secret"), ("ebnf_grammar", "start: secret")):
        found = submit(engine, kind, text).get(timeout=WAIT_S)
        assert "secret" in (found.problem or "") and found.code == "INVALID_ARG"
        assert found.logged.startswith(f"guided_decoding_guide of type {kind} cannot") and "secret" not in found.logged


def test_what_runs_the_library_has_a_larger_stack_than_the_trial(engine: Engine) -> None:
    seen: list[int] = []
    with library.large_stacks():
        thread = threading.Thread(target=lambda: seen.append(threading.stack_size()))
        thread.start()
        thread.join()
    assert seen == [library.LARGE_STACK_BYTES] and threading.stack_size() == 0


def test_no_private_path_reaches_a_client(tmp_path: Path) -> None:
    for content in ("{}", '{"decoder": {"type": "WordPiece"}, "model": {"vocab": {}}}', "["):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(Exception, match="tokenizer") as error:
            Grammars(tmp_path, 10).prepare()
        assert str(tmp_path) not in str(error.value)


LEFT_ALONE = """
import json, os, signal, sys, threading
from pathlib import Path
from backends.fastertransformer.engine.grammar.compiled import Grammars
from backends.fastertransformer.engine.request.guides import Guide
grammars = Grammars(Path(sys.argv[1]), int(sys.argv[2]))
grammars.compile(Guide("regex", "a"))
print(grammars._trials._process.pid, flush=True)
threading.Thread(target=grammars.compile, args=[Guide("json_schema", sys.argv[3])], daemon=True).start()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_trials_end_with_the_server_whatever_ends_it(tmp_path: Path) -> None:
    arguments = [str(guided_gpt2(tmp_path).checkpoint), str(END + 1), divisors(9973, 9967, 9883)]
    command = [sys.executable, "-c", LEFT_ALONE, *arguments]
    killed = subprocess.run(command, stdout=subprocess.PIPE, cwd=PROJECT, timeout=WAIT_S, check=False)
    assert killed.returncode == -signal.SIGKILL
    deadline = time.monotonic() + WAIT_S
    while living_in_group(int(killed.stdout)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
