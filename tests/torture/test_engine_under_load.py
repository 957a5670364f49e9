"""An engine under load with cancellations, streams, beams, shared beginnings and too little memory for all rows.

Every answer is compared with the request's solo run, in fp32; at the end no page is lost and memory has not grown. With
``--campaign hour`` each model is under load for two minutes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.shards.gpt2_checkpoint import random_gpt2, write_shards
from support.shards.llama_shards import served_of
from support.torture.engine_load import Load, make_known

from backends.fastertransformer.engine.rows.sequence import Sequence
from backends.fastertransformer.engine.settings import Settings

if TYPE_CHECKING:
    from support.torture.campaign import Campaign, Tally

POSITIONS = 256
SETTLED_S = 60  # in a shorter time not all of torch's buffers have their size
MOST_GROWTH_MB = {False: 100.0, True: 8.0}


def settings_of(name: str, folder: Path) -> Settings:
    if name == "gpt2":
        return Settings(write_shards(random_gpt2(n_positions=POSITIONS), folder), 1, 1, "fp32", cpu_threads=1)
    root, _ = served_of(name, folder, 1, max_position_embeddings=POSITIONS)
    return Settings(root, 1, 1, "fp32", 1, "Llama")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "name", [pytest.param("gpt2", marks=pytest.mark.long), "llama", pytest.param("gemma2", marks=pytest.mark.long)]
)
def test_engine_under_load(
    name: str, campaign: Campaign, tally: Tally, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_back, preempted = Sequence.preempt, 0

    def count(sequence: Sequence) -> None:
        nonlocal preempted
        preempted += 1
        set_back(sequence)

    monkeypatch.setattr(Sequence, "preempt", count)
    settings = settings_of(name, tmp_path)
    load = Load(settings, make_known(settings, campaign.trials(12, 360)))
    counts, prefixes = load.outcome.counts, load.engine._steps.cache.allocator.prefixes
    seen = ("answered", "cancelled", "parts of a stream")
    duration_s = campaign.trials(2, 720)
    if duration_s > SETTLED_S:
        load.warm_up()
    outcome = load.run(duration_s, lambda: all(counts[each] for each in seen) and preempted > 2)
    load.check_pages()
    found = prefixes.found
    load.engine.close()
    tally.remarks = (
        f"{outcome.tokens} tokens, {counts['cancelled']} cancelled, {counts['parts of a stream']} parts"
        f" of streams, {preempted} rows set back, {found} tokens found in the prefix cache, memory"
        f" {outcome.resident_mb[0]:.0f} MB at first, {outcome.resident_mb[-1]:.0f} at the end,"
        f" {outcome.growth_mb:+.1f} from the second to the last quarter"
    )
    for _ in range(counts["answered"]):
        tally.record()
    for problem in outcome.problems:
        tally.record(problem)
    tally.check()
    assert found
    assert outcome.growth_mb < MOST_GROWTH_MB[duration_s > SETTLED_S]
