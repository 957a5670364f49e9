"""Each finished file emptied, filled with zeros, truncated, ``null`` or with one bit flipped: redone or named."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.torture.five_stages import FIVE, TWO, Run, whole

from launcher.plan.plan import StagePlan
from launcher.run.artefact import is_current

if TYPE_CHECKING:
    from support.torture.campaign import Campaign, Tally

DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "emptied": lambda content: b"",
    "filled with zeros": lambda content: bytes(len(content)),
    "truncated": lambda content: content[: len(content) // 2],
    "null": lambda content: b"null\n",
    "with a bit flipped": lambda content: bytes([content[0] ^ 1]) + content[1:],
}


def damaged(file: Path, damage: str) -> bool:
    """Damage a file in place; False where that changes nothing."""
    content = file.read_bytes()
    changed = DAMAGES[damage](content) if content else content
    file.write_bytes(changed)
    return changed != content


@pytest.mark.timeout(0)
def test_damage_is_noticed(campaign: Campaign, tally: Tally, tmp_path: Path) -> None:
    """What is damaged is not current; nothing is run to find that out."""
    run = Run(shutil.copytree(whole(TWO).root, tmp_path / "copy"), TWO)
    plans = [StagePlan.from_json(path.read_text()) for path in run.results.glob("logs/*/*.plan.json")]
    copied = [StagePlan.from_json(p.to_json().replace(str(whole(TWO).root), str(run.root))) for p in plans]
    assert len(copied) == 2 and all(is_current(plan) for plan in copied), "a copy goes on"
    for plan in copied:
        files = sorted(path for path in plan.output.rglob("*") if path.is_file())
        for number, file in enumerate(files):
            content = file.read_bytes()
            for which, damage in enumerate(DAMAGES):
                if (number + which) % campaign.trials(50, 1) == 0 and damaged(file, damage):
                    tally.record(f"{file} {damage} is current" if is_current(plan) else None)
                    file.write_bytes(content)
        assert is_current(plan)
    tally.check()


@pytest.mark.timeout(0)
def test_damaged_results(campaign: Campaign, tally: Tally, tmp_path: Path) -> None:
    """The same command over damaged results: status 0 and right in all, or an error that names what is damaged."""
    cases = list(itertools.product(finished_files(), DAMAGES))
    for number, ((stages, name), damage) in enumerate(cases[: campaign.trials(1, len(cases))]):
        run = Run(shutil.copytree(whole(stages).root, tmp_path / str(number)), stages)
        if damaged(run.base / name, damage):
            tally.record(trial(run, name, damage))
        shutil.rmtree(run.root)
    tally.check()


def finished_files() -> list[tuple[str, str]]:
    """Choose files, with the stages that are run again: some of what convert and export made, and all others."""
    checkpoint, results = "tiny/ft_tp1_fp16/1-gpu", "tiny/export_tp1_pp1_fp16_fp16"
    served = f"{results}/model_repo/fastertransformer"
    two = [
        *(f"{checkpoint}/{name}" for name in ("model.wte.bin", "config.ini", "vocab.json", "manifest.json")),
        *(f"{served}/{name}" for name in ("1/1-gpu/model.wte.bin", "1/1-gpu/manifest.json", "config.pbtxt")),
        *(f"{results}/model_repo/{name}" for name in ("manifest.json", "preprocessing/1/model.py")),
        *(f"{results}/logs/{name}" for name in ("stages.json", "convert/convert.plan.json")),
    ]
    five = [
        *(f"{results}/evaluation/lambada/{name}" for name in ("metrics.json", "samples.csv", "manifest.json")),
        *(f"{results}/benchmark/static/{name}" for name in ("benchmark.csv", "manifest.json")),
        *(f"{results}/report/{name}" for name in ("report.md", "report.html", "manifest.json")),
    ]
    return [(TWO, name) for name in two] + [(FIVE, name) for name in five]


def trial(run: Run, name: str, damage: str) -> str | None:
    """Run again over the damage; returns what did not hold."""
    status, output = run.run()
    expected = whole(run.stages)
    problems = ["a traceback"] if "Traceback" in output else []
    if status == 0:
        problems += ["figures are wrong"] if run.figures() != expected.figures() else []
        problems += ["shards are wrong"] if run.shards() != expected.shards() else []
        problems += [f"still damaged: {run.damages()}"] if run.damages() else []
        problems += ["not redone"] if name.endswith(".json") and not is_json(run.base / name) else []
    elif Path(name).name not in output:
        problems.append(f"ended with {status} and does not name it")
    problems += [f"left {left}"] if (left := run.residue()) else []
    return f"{name} {damage}: {'; '.join(problems)}: {output[-800:]}" if problems else None


def is_json(file: Path) -> bool:
    try:
        return bool(json.loads(file.read_text()))
    except ValueError:
        return False
