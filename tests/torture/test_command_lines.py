"""Command lines of random settings: each ends in order, or with one message of ours; a dry run touches nothing."""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.torture.campaign import Campaign, Tally
from support.torture.command_line_server import PROJECT, CommandLines, Ended

from launcher.config.schema import Config

NEMO = PROJECT / "tests" / "data" / "nemo" / "gpt122_tp1_pp1.nemo"
MOST_CPU_S = 20
GROUPS = ("cluster", "export", "deployment", "evaluation", "benchmark")


@pytest.fixture(scope="module")
def lines() -> Iterator[CommandLines]:
    server = CommandLines()
    yield server
    server.close()


@dataclasses.dataclass(frozen=True)
class Attempts:
    """Runs command lines in a directory of their own, dry, and judges how they end."""

    lines: CommandLines
    place: Path

    def run(self, *argv: str) -> Ended:
        where = (f"base_results_dir={self.place / 'results'}", f"export.model.checkpoint_path={NEMO}")
        base = ("cluster_type=interactive", "stages=[convert,export,deploy,evaluate,benchmark]", *where)
        # Flags stand before the settings: argparse takes no others after them. The last word is that it is dry.
        flags = [word for word in argv if word.startswith("-")]
        rest = [word for word in argv if not word.startswith("-")]
        return self.lines.run(*flags, *base, *rest, "dry_run=true", cwd=self.place)

    def failure(self, *argv: str) -> str | None:
        """What went wrong with a command line; None if all is well."""
        ended = self.run(*argv)
        shown = f"{[word[:200] for word in argv]}: status {ended.status}"
        if "Traceback" in ended.out + ended.err or ended.status not in (0, 1, 2):
            return f"{shown}: {ended.err[-300:]}"
        if ended.status == 1 and ended.err.count("slipway: ") < 1:
            return f"{shown}, without a message: {ended.err[:300]}"
        if ended.status == 2 and "usage:" not in ended.err:
            return f"{shown}, without the usage: {ended.err[:300]}"
        if ended.cpu_s > MOST_CPU_S:
            return f"{shown} after {ended.cpu_s:.0f} s"
        written = sorted(path.name for path in self.place.rglob("*") if path.name != "pipe")
        return f"{shown}, and wrote {written}" if written else None


@pytest.fixture
def attempts(lines: CommandLines, tmp_path: Path) -> Attempts:
    os.mkfifo(tmp_path / "pipe")
    return Attempts(lines, tmp_path)


def keys_of(node: type, place: str = "") -> Iterator[str]:
    """Every key of the configuration, sections included."""
    for name, hint in typing.get_type_hints(node).items():
        if place + name == "dry_run":
            continue
        yield place + name
        for arm in (hint, *typing.get_args(hint)):
            if isinstance(arm, type) and dataclasses.is_dataclass(arm):
                yield from keys_of(arm, f"{place}{name}.")


KEYS = list(keys_of(Config))
WORDS = [
    *("", "null", "true", "0", "-1", "1", "2147483648", "1e400", "nan", "-inf", "1_0", "0x10", "???", "~", "[]", "{}"),
    *("a", "convert", "[convert,null]", "'a b'", '"\\"', "a'b", "a,b", "1,2", "range(1,3)", "choice(a,b)", "glob(*)"),
    *("pipe", "pipe/x", ".", "..", "x/y", "hf:a/b", "hf:", "localhost:1", "node:99999", ":"),
    *("${stages}", "${export}", "${oc.env:HOME}", "${oc.env:NO_SUCH_NAME}", "${oc.env:X,1}", "${nope}", "${nope:1}"),
    *("${oc.decode:'[1,2]'}", "${oc.select:export.model}", "${oc.dict.keys:export}", "${oc.create:{a:1}}", "${.x}"),
    *("${variant:1}", "${training_dir:a}", "${project_dir:}", "${sweep_dir:a,b}", "${", "$", "${now:%Y}", "${..}"),
    *("a" * 4000, "9" * 5000, "[" * 200 + "]" * 200, "\\", "a\nb", "a\tb", "\udcff", "\u2603", "é", "=", "a=b", "@"),
]
FLAGS = [
    *("-m", "--multirun", "--cfg=job", "--cfg=hydra", "--cfg=all", "--cfg=x", "--resolve", "--package=x", "--package="),
    *("--info", "--info=defaults", "--info=x", "--help", "--hydra-help", "--version", "--config-name=x", "--run"),
    *("--config-dir=x", "--config-dir=pipe", "--config-path=x", "--experimental-rerun=x", "--x", "-x", "--"),
    *("--shell-completion", "--config-name=cluster/bcm", "--experimental-rerun=pipe"),
]
VALUES = st.recursive(
    st.sampled_from(WORDS) | st.integers().map(str) | st.floats().map(str) | st.text(max_size=30).map(repr),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda parts: f"[{','.join(parts)}]")
        | st.lists(st.tuples(st.sampled_from(["a", "1", "null", "x.y", "name"]), inner), max_size=3).map(
            lambda pairs: "{" + ",".join(f"{name}: {value}" for name, value in pairs) + "}"
        )
    ),
    max_leaves=6,
)
SIGNS = st.sampled_from(["", "", "", "", "+", "++", "~"])
BELOW = st.sampled_from(["", "", "", "", ".x", ".0", ".x.y", "@x", "@:", ".", "x"])
SETTINGS = st.builds(
    lambda sign, key, below, value: f"{sign}{key}{below}={value}", SIGNS, st.sampled_from(KEYS), BELOW, VALUES
)
OPTIONS = st.builds(lambda sign, group, value: f"{sign}{group}={value}", SIGNS, st.sampled_from(GROUPS), VALUES)
CHOSEN = st.sampled_from(
    [
        *("evaluation=parity", "evaluation=squad", "evaluation=[translation,lambada]", "benchmark=load", "~stages"),
        *("cluster_type=bcm", "cluster_type=bcp", "cluster_type=auto", "cluster=bcp", "export=t5/export_t5", "~export"),
    ]
)
NO_NUL = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)
COMMAND_LINES = st.lists(SETTINGS | SETTINGS | OPTIONS | CHOSEN | NO_NUL | st.sampled_from(FLAGS), max_size=4)


@pytest.mark.timeout(4 * 3600)
def test_random_command_lines(attempts: Attempts, campaign: Campaign, tally: Tally) -> None:
    @settings(
        max_examples=campaign.trials(12, 3000),
        derandomize=not campaign.is_full,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(COMMAND_LINES)
    def attempt(words: list[str]) -> None:
        tally.record(attempts.failure(*(word.replace("\0", "") for word in words)))

    attempt()
    tally.check()


ONCE_A_TRACEBACK = [
    *(["export=null"], ["deployment=2"], ["benchmark=1"], ["evaluation=null"], ["+evaluation.squad.samples=1"]),
    *(["evaluation.parity.limits.x={1:2}"], ["benchmark.load.request_rates.x=1"], ["stages=[[convert]]"]),
    *(["force=[[1,2]]"], ["force=${oc.env:X,1}"], ["stages=${oc.env:HOME}"], ["evaluation.run.tasks=1"]),
    *(["evaluation=parity", "evaluation.parity.limits=${oc.env:HOME}"], ["--experimental-rerun=x"]),
    *(["--cfg=job", "--info"], ["deployment.endpoint=" + "a" * 4000], ["export.model.checkpoint_path=" + "a" * 4000]),
    *(
        ["evaluation.gate.baseline=" + "a" * 4000],
        ["+a=" + "[" * 3000 + "]" * 3000],
        ["stages=" + "[" * 300 + "]" * 300],
    ),
    *(["export.model.tensor_model_parallel_size=" + "9" * 5000], ["@x=1"], ["export@x=1"], ["hydra=null"]),
    *(["hydra.run.dir=/proc/x"], ["benchmark.batch_sizes=${export}"], ["env_vars=${oc.env:HOME}"]),
    *(["-m", "export.triton_deployment.max_batch_size=1,2"], ["env_vars={a: {b: 1}}"]),
]


def test_command_lines_that_once_gave_a_traceback(attempts: Attempts, campaign: Campaign, tally: Tally) -> None:
    for words in ONCE_A_TRACEBACK[: campaign.trials(14, len(ONCE_A_TRACEBACK))]:
        tally.record(attempts.failure(*words))
    tally.check()


@pytest.mark.parametrize(
    "words",
    [
        ["evaluation.lambada.data_path={}"],
        ["evaluation=parity", "evaluation.parity.data_path={}"],
        ["evaluation.gate.thresholds={}"],
        ["evaluation=translation", "evaluation.translation.data_path={}", "evaluation.translation.reference_path={}"],
        ["deployment.endpoint={}"],
        ["export.model.checkpoint_path={}"],
        ["benchmark=load", "benchmark.load.prompt_file={}"],
    ],
)
def test_a_pipe_is_no_data(attempts: Attempts, words: list[str]) -> None:
    ended = attempts.run(*(word.format("pipe") for word in words))
    assert ended.status == 1 and "slipway: " in ended.err and "Traceback" not in ended.err, ended.err
    assert ended.cpu_s < MOST_CPU_S
