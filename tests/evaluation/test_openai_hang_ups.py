"""Clients of an OpenAI API that hang up in the middle of a stream; the server notes how far each answer came."""

from __future__ import annotations

import asyncio
import csv
import gzip
import time
from pathlib import Path

import pytest
from support.measurements.short_load import short_load
from support.servers.raw_openai_server import VLLM_FIELDS, RawServer

from evaluation import load, recompute
from evaluation.speed.prompts.workload import LoadPrompt
from evaluation.speed.tables.raw_records import read_records
from evaluation.speed.tables.record import RequestRecord
from evaluation.speed.tables.table import LOAD_TABLE
from evaluation.speed.transport.openai_events import HangUp
from evaluation.speed.transport.openai_wire import Dialect, OpenAIWire
from handover.endpoint import Endpoint
from handover.errors import ConfigError

WHOLE, AFTER, EACH_S = 30, 4, 0.02
USAGE = {"stream_options": {"include_usage": True}}


def ask(server: RawServer, dialect: Dialect, after: int = AFTER) -> list[RequestRecord]:
    """A request that is hung up on, and one that is not, over one wire; the server has time to notice."""

    async def both() -> list[RequestRecord]:
        prompts = LoadPrompt((1, 2, 3), WHOLE, "one two three", cancel_after=after), LoadPrompt((1,), 3, "one")
        async with OpenAIWire(Endpoint.read(server.url), dialect, 20.0, is_streaming=True) as wire:
            records = [await wire.ask(dialect.encode(prompt, is_streaming=True), 0) for prompt in prompts]
            deadline = time.monotonic() + 240
            while server.in_flight and time.monotonic() < deadline:
                await asyncio.sleep(EACH_S)
            return records

    return asyncio.run(both())


@pytest.mark.parametrize(
    "fields",
    [
        {"return_token_ids": True},  # each event says how many tokens it has
        USAGE,  # only the end does, which does not come: an event counts as a token
    ],
)
def test_a_client_hangs_up_at_a_token_and_does_not_wait_for_the_next(fields: dict[str, object]) -> None:
    with RawServer(pause_after=AFTER) as server:
        cut, whole = ask(server, Dialect("raw", stream_fields=dict(fields) | USAGE))
        left, right = server.exchanges
        assert server.in_flight == 0
    assert (cut.is_cancelled, cut.error, cut.output_tokens, cut.chunk_tokens) == (True, "", AFTER, (1,) * AFTER)
    assert (cut.input_tokens, cut.is_complete, cut.done_ns) == (3, False, cut.chunk_ns[-1])
    assert len(left.token_ns) == AFTER
    assert all(seen > written for seen, written in zip(cut.chunk_ns, left.token_ns, strict=False))
    assert (whole.is_complete, whole.output_tokens, len(right.token_ns)) == (True, 3, 3)


def test_an_event_of_several_tokens_may_go_beyond_the_number_at_which_a_client_hangs_up() -> None:
    with RawServer(each_s=EACH_S, chunk=3) as server:
        cut, _ = ask(server, Dialect("raw", stream_fields={"return_token_ids": True} | USAGE))
    assert (cut.is_cancelled, cut.chunk_tokens) == (True, (3, 3))


def test_conversations_are_hung_up_on_too() -> None:
    with RawServer(pause_after=AFTER, is_chat_only=True, takes_ids=False) as server:
        dialect = Dialect("raw", is_chat=True, takes_ids=False, stream_fields=USAGE)
        cut, whole = ask(server, dialect)
        assert len(server.exchanges[0].token_ns) == AFTER
    assert (cut.is_cancelled, cut.output_tokens, whole.output_tokens) == (True, AFTER, 3)


def test_a_failure_before_the_hang_up_is_a_failure() -> None:
    for fault, reason in (("html", "text/html"), ("busy", "429"), ("close", "Disconnected"), ("cut", "cut off")):
        with RawServer(each_s=0.001) as server:
            server.faults.append(fault)
            record, _ = ask(server, Dialect("raw", stream_fields={"return_token_ids": True} | USAGE))
        assert (record.is_cancelled, reason in record.error) == (False, True), record.error


def test_tokens_are_counted_over_pieces_that_end_anywhere() -> None:
    stream = b"".join(
        b'data: {"choices": [{"text": " a", "token_ids": %s}]}\n\n' % ids for ids in (b"[]", b"[1]", b"[2, 3]", b"[4]")
    )
    for size in (1, 7, len(stream)):
        hang_up, seen = HangUp(3, 5), b""
        for start in range(0, len(stream), size):
            seen += hang_up.take(stream[start : start + size])
            if hang_up.is_due:
                break
        assert hang_up.is_due and seen.endswith(b"[2, 3]}]}\n"), "what comes behind the third token is not read"
    whole, rest = HangUp(2, 3), b"data: [DONE]\n\n: a comment\n\ndata: no JSON\n\n"
    assert whole.take(stream + rest) == stream + rest
    assert not whole.is_due, "all tokens are there: nothing is left to hang up on"


@pytest.mark.parametrize("fields", [VLLM_FIELDS, frozenset({"stream_options", "ignore_eos"})])
def test_a_load_counts_hang_ups_apart_and_records_them(tmp_path: Path, fields: frozenset[str]) -> None:
    with RawServer(each_s=0.004, pause_after=AFTER, pause_s=0.2, fields=fields) as server:
        shares = {"cancel_share": 0.4, "cancel_after": AFTER}
        given = short_load(server.url, tmp_path, lengths=("5/12",), concurrencies=(3,), requests=40, **shares)
        load.main(given.to_argv())
        sent = [each for each in server.exchanges if each.body["max_tokens"] == 12]
    (row,) = LOAD_TABLE.read(tmp_path / "load.csv")
    found = read_records(tmp_path / row.directory)
    assert found is not None
    cancelled = [record for record in found.records if record.is_cancelled]
    assert (row.state, row.requests, row.failed_requests, row.error) == ("ok", 40, 0, "")
    assert row.cancelled_requests == len(cancelled) and 8 <= len(cancelled) <= 26, "four of ten"
    assert {record.output_tokens for record in cancelled} == {AFTER}
    assert {record.output_tokens for record in found.records if record.is_complete} == {12}
    cut = [len(each.token_ns) for each in sent if len(each.token_ns) < 12]
    assert len(cut) >= len(cancelled) and max(cut) <= AFTER + 2
    with gzip.open(tmp_path / row.directory / "requests.csv.gz", "rt", newline="") as stream:
        statuses = [line["status"] for line in csv.DictReader(stream) if line["repeat"] == "1"]
    assert statuses.count("cancelled") == len(cancelled) and statuses.count("ok") == 40 - len(cancelled)
    assert row.figures["requests_per_s"] == pytest.approx((40 - len(cancelled)) / (row.duration_s or 0), rel=1e-4)
    assert row.figures["e2e_p50_ms"] >= 11 * 4  # type: ignore[operator]
    recompute.main([f"--output={tmp_path}"])


def test_whole_answers_cannot_be_hung_up_on(tmp_path: Path) -> None:
    with RawServer() as server, pytest.raises(ConfigError, match="hang up in the middle of a stream") as caught:
        load.main(short_load(server.url, tmp_path, cancel_share=0.5, streaming=False).to_argv())
    assert "streaming=true" in str(caught.value)


IDLE = """vllm:num_requests_running{engine="0",model_name="raw"} %d
vllm:num_requests_waiting{engine="0",model_name="raw"} 0
"""


def test_the_load_waits_until_the_server_says_that_it_is_idle(tmp_path: Path) -> None:
    with RawServer(metrics=IDLE % 0, each_s=0.001) as server:
        load.main(short_load(server.url, tmp_path, lengths=("5/12",), requests=10, cancel_share=0.5).to_argv())
    (row,) = LOAD_TABLE.read(tmp_path / "load.csv")
    assert row.figures["server_idle_s"] is not None and row.figures["server_idle_s"] < 5
