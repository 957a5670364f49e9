"""Workloads beside plain lengths: known services, shared prefixes, conversations, and recorded traces."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evaluation.speed.prompts.lengths import NAMED_LENGTHS, LengthDistribution
from evaluation.speed.prompts.tokens import RandomIds
from evaluation.speed.prompts.trace import read_trace
from evaluation.speed.prompts.workload import DrawingContext, LoadPrompt, Workload, fit_lengths, seeded
from handover.errors import ConfigError


def draw(workload: str, count: int, most: int | None = None, seed: int = 0, think_s: float = 0.0) -> list[LoadPrompt]:
    context = DrawingContext(RandomIds(5000), seeded(seed, workload), most, think_s)
    return list(itertools.islice(Workload.parse(workload).prompts(context), count))


def turns_of(prompt: LoadPrompt) -> list[LoadPrompt]:
    turns = [prompt]
    while turns[-1].follow_up is not None:
        turns.append(turns[-1].follow_up)
    return turns


def test_a_lognormal_length_has_the_median_and_the_spread_that_were_given() -> None:
    random = seeded(1)
    lengths = LengthDistribution.parse("lognormal:200:0.5")
    drawn = np.log([lengths.draw(random) for _ in range(4000)])
    assert np.exp(np.median(drawn)) == pytest.approx(200, rel=0.03)
    assert drawn.std() == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize(
    ("name", "means", "medians", "p90s"),
    [  # of the published tables of lengths themselves, computed by numpy; None: not published
        ("sharegpt", (2340.0, 438.7), (1730, 415), (5696, 834)),
        ("chat_log", (1154.7, 211.1), (1020, 129), (2734.5, 424)),
        ("long_document", None, (7059, 208), (12985, 371)),
        ("cnn_dailymail", (780, 128), None, None),
        ("open_orca", (None, 294.45), None, None),
    ],
)
def test_known_lengths_have_the_statistics_of_their_source(name: str, means: Any, medians: Any, p90s: Any) -> None:
    random = seeded(2, name)
    known = NAMED_LENGTHS[name]
    for index, distribution in enumerate((known.input, known.output)):
        drawn = np.array([distribution.draw(random) for _ in range(20_000)])
        assert drawn.min() >= 1
        for expected, found in ((means, drawn.mean()), (medians, np.median(drawn)), (p90s, np.percentile(drawn, 90))):
            if expected is not None and expected[index] is not None:
                assert found == pytest.approx(expected[index], rel=0.05), (name, index)


def test_long_prompts_are_shortened_to_the_models_positions_and_marked() -> None:
    prompts = draw("sharegpt", 400, most=2048)
    assert max(len(prompt.ids) + prompt.output_length for prompt in prompts) == 2048
    whole = draw("sharegpt", 400)
    fits = [len(prompt.ids) + prompt.output_length <= 2048 for prompt in whole]
    assert [not prompt.is_clipped for prompt in prompts] == fits
    assert 0.3 < np.mean(fits) < 0.7
    assert [prompt for prompt, fit in zip(prompts, fits, strict=True) if fit] == list(itertools.compress(whole, fits))


@pytest.mark.parametrize(
    ("lengths", "most", "expected"),
    [((10, 5), None, (10, 5)), ((10, 5), 15, (10, 5)), ((11, 5), 15, (10, 5)), ((9, 40), 15, (1, 14))],
)
def test_a_prompt_loses_tokens_before_its_answer_does(
    lengths: tuple[int, int], most: int | None, expected: tuple[int, int]
) -> None:
    assert fit_lengths(*lengths, most) == expected


def test_prompts_of_a_group_share_their_beginning() -> None:
    prompts = draw("shared_prefix:64x3:uniform:5:9/4", 60)
    assert {len(prompt.ids) - 64 for prompt in prompts} == {5, 6, 7, 8, 9}
    assert len({prompt.ids[:64] for prompt in prompts}) == 3
    assert len({prompt.ids for prompt in prompts}) == 60
    assert len({prompt.ids[:64] for prompt in draw("shared_prefix:64:5/4", 20)}) == 1


def test_a_turn_continues_the_turn_before_and_its_answer() -> None:
    for conversation in draw("agent:4:uniform:10:12/7", 5):
        turns = turns_of(conversation)
        assert len(turns) == 4
        for earlier, later in itertools.pairwise(turns):
            assert later.ids[: len(earlier.ids)] == earlier.ids
            assert 10 <= len(later.ids) - len(earlier.ids) - earlier.output_length <= 12
        assert not any(turn.is_clipped for turn in turns)


def test_a_conversation_ends_where_the_next_turn_does_not_fit() -> None:
    (conversation,) = draw("agent:9:10/6", 1, most=50)
    turns = turns_of(conversation)
    assert [len(turn.ids) for turn in turns] == [10, 26, 42]  # 42 + 6 tokens fit 50 positions, 58 + 6 do not
    assert [turn.is_clipped for turn in turns] == [False, False, True]


def test_think_times_are_exponential_and_none_precedes_the_first_turn() -> None:
    conversations = [turns_of(prompt) for prompt in draw("agent:3:1/1", 1000, think_s=2.0)]
    assert {turns[0].think_s for turns in conversations} == {0.0}
    later = np.array([turn.think_s for turns in conversations for turn in turns[1:]])
    assert (later.mean(), later.std()) == (pytest.approx(2, rel=0.1), pytest.approx(2, rel=0.1))


@pytest.mark.parametrize(
    "text",
    [
        *(
            "sharegtp",
            "shared_prefix:60/20",
            "shared_prefix:0:60/20",
            "shared_prefix:64x0:60/20",
            "shared_prefix:64:60",
        ),
        *("agent:60/20", "agent:0:60/20", "agent:2.5:60/20", "lognormal:10/2", "lognormal:10:9/2", "lognormal:0:1/2"),
    ],
)
def test_what_is_no_workload_is_refused_with_what_is_legal(text: str) -> None:
    with pytest.raises(ConfigError, match="sharegpt, chat_log|lognormal:MEDIAN:SIGMA"):
        Workload.parse(text)


TRACE = [  # blocks of 4 tokens: the first two requests share one block, the second and the third two
    {"timestamp": 5000, "input_length": 6, "output_length": 3, "hash_ids": [7, 8]},
    {"timestamp": 6500.5, "input_length": 11, "output_length": 1, "hash_ids": [7, 9, 10]},
    {"timestamp": 6000, "input_length": 9, "output_length": 2, "hash_ids": [7, 9, 11]},
    {"timestamp": 9000, "input_length": 5, "output_length": 4},
]


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def replayed(path: Path, seed: int = 0, most: int | None = None) -> list[LoadPrompt]:
    context = DrawingContext(RandomIds(30_000), seeded(0), most)
    return list(read_trace(path, 4).prompts(context, seed))


def test_a_trace_is_replayed_at_its_times_with_its_shared_blocks(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", *TRACE)
    trace = read_trace(path, 4)
    assert list(trace.arrivals_ns(1.0)) == [0, 1_000_000_000, 1_500_500_000, 4_000_000_000]
    assert list(trace.arrivals_ns(2.0)) == [0, 500_000_000, 750_250_000, 2_000_000_000]
    assert trace.rate_per_s(2.0) == 2.0  # four requests in two seconds
    first, second, third, last = replayed(path)
    assert [(len(prompt.ids), prompt.output_length) for prompt in (first, second, third, last)] == [
        *((6, 3), (9, 2), (11, 1), (5, 4))
    ]
    assert first.ids[:4] == second.ids[:4] == third.ids[:4]
    assert second.ids[4:8] == third.ids[4:8] != first.ids[4:6] + first.ids[:2]
    assert second.ids[8] != third.ids[8]
    assert replayed(path) == [first, second, third, last]
    assert replayed(path, seed=1)[0].ids != first.ids


def test_what_does_not_fit_the_model_is_shortened_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", *TRACE)
    prompts = replayed(path, most=10)
    assert [(len(prompt.ids), prompt.output_length, prompt.is_clipped) for prompt in prompts] == [
        *((6, 3, False), (8, 2, True), (9, 1, True), (5, 4, False))
    ]
    assert prompts[1].ids == replayed(path)[1].ids[:8], "the shared beginning is kept"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"timestamp": 0, "input_length": 9}, "trace.jsonl:2 is no request of a trace: KeyError.'output_length'"),
        ({"timestamp": 0, "input_length": 0, "output_length": 1}, "trace.jsonl:2: .* lengths at least 1"),
        ({"timestamp": float("inf"), "input_length": 1, "output_length": 1}, "timestamps are finite"),
        ({"timestamp": 0, "input_length": 4, "output_length": 1, "hash_ids": [1, 2]}, "2 hash_ids, but 4 tokens are 1"),
        ([1, 2], "trace.jsonl:2 is no request"),
    ],
)
def test_a_damaged_trace_is_named(tmp_path: Path, line: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_trace(write(tmp_path / "trace.jsonl", TRACE[0], line), 4)


def test_an_empty_or_missing_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no request"):
        read_trace(write(tmp_path / "trace.jsonl"), 4)
    with pytest.raises(ConfigError, match="there is no trace"):
        read_trace(tmp_path / "none.jsonl", 4)
