from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.plan.plan import Command, Resources, StagePlan, partial

text = st.text(min_size=1).filter(lambda s: "\0" not in s)
paths = st.text(alphabet="ab c'\"$;\n/", min_size=1).map(lambda s: Path("/") / s.strip("/"))
plans = st.builds(
    StagePlan,
    stage=text,
    name=text,
    commands=st.lists(st.builds(Command, st.lists(text).map(tuple), st.integers(1, 8))).map(tuple),
    resources=st.builds(
        Resources, st.integers(1, 4), st.integers(0, 8), text, st.none() | text, st.lists(text).map(tuple)
    ),
    inputs=st.lists(paths).map(tuple),
    output=paths,
    log=paths,
    env=st.dictionaries(text, text),
    service=st.booleans(),
    needs_server=st.booleans(),
    always=st.booleans(),
    independent=st.booleans(),
)

# A plan has many fields, and tests share the cores.
however_long = settings(suppress_health_check=[HealthCheck.too_slow])


@however_long
@given(plans)
def test_a_plan_survives_json(plan: StagePlan) -> None:
    assert StagePlan.from_json(plan.to_json()) == plan


@however_long
@given(plans)
def test_the_fingerprint_ignores_what_does_not_change_the_result(plan: StagePlan) -> None:
    renamed = replace(plan, name=plan.name + "x", resources=Resources(time_limit="9:00:00"), log=plan.log.parent / "x")
    assert renamed.fingerprint == plan.fingerprint
    assert replace(plan, env={**plan.env, "new variable": "1"}).fingerprint != plan.fingerprint
    more = replace(plan, commands=(*plan.commands, Command(("true",))))
    assert more.fingerprint != plan.fingerprint


def test_partial_is_a_sibling() -> None:
    assert partial(Path("/a/2-gpu")) == Path("/a/2-gpu.partial")
