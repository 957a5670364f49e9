"""What the load generator asks and when."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from evaluation.speed.prompts.lengths import LengthDistribution
from evaluation.speed.prompts.prompt_file import read_prompt_file
from evaluation.speed.prompts.tokens import RandomIds
from evaluation.speed.prompts.workload import DrawingContext, LoadPrompt, Workload, arrivals_ns, seeded
from handover.errors import ConfigError


def take(count: int, *arguments: object) -> npt.NDArray[Any]:
    return np.array(list(itertools.islice(arrivals_ns(*arguments), count))) / 1e9  # type: ignore[arg-type]


def test_constant_arrivals_are_evenly_spaced() -> None:
    assert take(4, 8.0, "constant", 0.0, seeded(0)).tolist() == [0.125, 0.25, 0.375, 0.5]


def test_poisson_arrivals_have_exponential_gaps_of_the_rate() -> None:
    gaps = np.diff(take(20_001, 50.0, "poisson", 0.0, seeded(0)))
    assert gaps.mean() == pytest.approx(0.02, rel=0.03)
    assert gaps.std() == pytest.approx(0.02, rel=0.03), "an exponential's deviation is its mean"
    assert np.mean(gaps > 0.02) == pytest.approx(np.exp(-1), abs=0.02)


def test_the_ramp_reaches_the_rate_with_half_of_its_requests() -> None:
    # rate 10 t / 4 for 4 s: the n-th request is due where 10 t^2 / 8 = n; 20 in the ramp, then 10 a second
    due = take(40, 10.0, "constant", 4.0, seeded(0))
    assert due[4] == pytest.approx(2.0)  # 10 * 4 / 8 = 5
    assert due[19] == pytest.approx(4.0)
    assert np.diff(due[19:]).tolist() == pytest.approx([0.1] * 20)


def test_the_same_seed_and_point_draw_the_same() -> None:
    def draw(seed: int, level: float) -> list[LoadPrompt]:
        random = seeded(seed, "uniform:2:9/4", "closed", level)
        return list(
            itertools.islice(Workload.parse("uniform:2:9/4").prompts(DrawingContext(RandomIds(100), random)), 5)
        )

    assert draw(0, 1.0) == draw(0, 1.0)
    assert draw(0, 1.0) != draw(1, 1.0)
    assert draw(0, 1.0) != draw(0, 2.0)


def test_lengths_follow_their_distribution() -> None:
    random = seeded(0)
    uniform = [LengthDistribution.parse("uniform:20:22").draw(random) for _ in range(300)]
    assert set(uniform) == {20, 21, 22}, "both ends are included"
    normal = np.array([LengthDistribution.parse("normal:100:20").draw(random) for _ in range(2000)])
    assert (normal.mean(), normal.std()) == (pytest.approx(100, abs=2), pytest.approx(20, abs=1.5))
    assert min(LengthDistribution.parse("normal:1:5").draw(random) for _ in range(50)) == 1
    prompt = next(Workload.parse("7/3").prompts(DrawingContext(RandomIds(11), random)))
    assert (len(prompt.ids), prompt.output_length) == (7, 3)
    assert max(prompt.ids) < 11


@pytest.mark.parametrize("text", ["60", "60/20/1", "a/2", "uniform:5/2", "uniform:9:2/2", "0/2", "zipf:2:3/1", "inf/1"])
def test_what_is_no_pair_of_lengths_is_refused_with_what_is_legal(text: str) -> None:
    with pytest.raises(ConfigError, match="uniform:LOW:HIGH"):
        Workload.parse(text)


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def words(text: str) -> list[int]:
    return [len(word) for word in text.split()]


def test_prompt_files_of_every_kind(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "who is there"}, {"from": "gpt", "value": "no one"}]
    file = write(
        tmp_path / "p.jsonl",
        {"input_ids": [5, 6], "output_length": 3},
        {"prompt": "one two", "output_length": 4},
        {"prompt": "one two three", "completion": "four five"},
        {"id": "x", "conversations": turns},
        {"conversations": turns[:1]},
        {"input_ids": [1] * 9, "output_length": 3},
    )
    prompts, left_out = read_prompt_file(file, words, 10)
    expected = [((5, 6), 3), ((3, 3), 4), ((3, 3, 5), 2), ((3, 2, 5), 2)]
    assert [(prompt.ids, prompt.output_length) for prompt in prompts] == expected
    assert left_out == 2


def test_a_damaged_prompt_line_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"p\.jsonl:2 is no prompt"):
        read_prompt_file(
            write(tmp_path / "p.jsonl", {"input_ids": [1], "output_length": 1}, {"text": "x"}), words, None
        )
    with pytest.raises(ConfigError, match="tokenizer is not on this machine"):
        read_prompt_file(write(tmp_path / "t.jsonl", {"prompt": "x", "output_length": 1}), None, None)
    with pytest.raises(ConfigError, match="no prompt that fits"):
        read_prompt_file(write(tmp_path / "l.jsonl", {"input_ids": [1, 2], "output_length": 9}), None, 4)
