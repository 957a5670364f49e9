"""Every text key of the configuration takes a text that looks like a number as it is written."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from support.runs.composed import compose

from handover.errors import ConfigError
from launcher.config.command_line import read
from launcher.config.schema import Config, register
from launcher.config.wording import explained

LOOK_LIKE_NUMBERS = ("1e5", "1.10", "1_000", "true", "NaN", ".5", "+7")


@pytest.fixture(autouse=True)
def schema() -> Iterator[None]:
    register()
    yield
    GlobalHydra.instance().clear()


def text_keys(section: type, place: str = "") -> Iterator[tuple[str, bool]]:
    """All keys that hold a text, or a list of them."""
    for name, hint in typing.get_type_hints(section).items():
        arms = [arm for arm in (hint, *typing.get_args(hint)) if arm is not type(None)]
        if below := next((arm for arm in arms if dataclasses.is_dataclass(arm)), None):
            assert isinstance(below, type)
            if typing.get_origin(hint) is not dict:
                yield from text_keys(below, f"{place}{name}.")
        elif str in arms and typing.get_origin(hint) is not dict:
            yield f"{place}{name}", typing.get_origin(hint) is list


TEXTS = dict(text_keys(Config))


def value_at(config: Config, key: str) -> Any:
    found: Any = config
    for word in key.split("."):
        found = found[word] if isinstance(found, dict) else getattr(found, word)
    return found


def test_every_text_key_takes_a_text_that_looks_like_a_number() -> None:
    chosen = "evaluation=[lambada,squad,translation,summarization,parity,divergence,consistency,monitor]"
    assert len(TEXTS) > 60 and {"export.run.model_train_name", "cluster.setup", "deployment.host"} <= TEXTS.keys()
    given = {key: LOOK_LIKE_NUMBERS[index % len(LOOK_LIKE_NUMBERS)] for index, key in enumerate(TEXTS)}
    for key in ("deployment.endpoint_key_env", "signing.password_env"):  # names of variables that must be there
        del given[key]
    words = [f"{key}=[x,{text}]" if TEXTS[key] else f"{key}={text}" for key, text in given.items()]
    config = compose([chosen, *read(words)])
    found = {key: value_at(config, key) for key in given}
    assert found == {key: ["x", text] if TEXTS[key] else text for key, text in given.items()}
    for text in LOOK_LIKE_NUMBERS:
        (word,) = read([f"export.run.model_train_name={text}"])
        assert OverridesParser.create().parse_override(word).value() == text


def test_variables_and_options_of_sbatch_too_and_numbers_stay_numbers() -> None:
    words = ["env_vars.A=1e5", "env_vars.B=true", "cluster.additional_parameters={comment: 1e5, requeue: true}"]
    words += ["deployment.command=[serve,1e5]", "benchmark.gpu_hour_price=1e1", "benchmark.load.request_rates=[1e1]"]
    config = compose(read(words))
    assert {"A": "1e5", "B": "true"}.items() <= config.env_vars.items()
    assert config.cluster.additional_parameters == {"comment": "1e5", "requeue": True}
    assert config.deployment.command == ["serve", "1e5"]
    assert config.benchmark.gpu_hour_price == 10.0 and vars(config.benchmark.load)["request_rates"] == [10.0]


def test_partitions_with_commas_are_one_text_and_the_values_of_a_sweep() -> None:
    words = ["cluster.partition=small,low", "env_vars.NCCL_IB_HCA=mlx5_0,mlx5_1"]
    words += ["cluster.additional_parameters.mail-type=END,FAIL", "cluster.additional_parameters.exclude=a[1-2,7],b3"]
    config = compose(read(words))
    assert config.cluster.partition == "small,low" and config.env_vars["NCCL_IB_HCA"] == "mlx5_0,mlx5_1"
    assert config.cluster.additional_parameters == {"mail-type": "END,FAIL", "exclude": "a[1-2,7],b3"}
    assert read(["-m", "cluster.partition=small,low"])[1] == "cluster.partition=small,low"
    assert read(["-m", "export.run.model_train_name=1e5,2"])[1] == 'export.run.model_train_name="1e5",2'


def test_other_keys_with_commas_name_the_three_ways_out() -> None:
    with pytest.raises(ConfigError, match="cluster.account=a,b: several values") as refused, explained():
        compose(read(["cluster.account=a,b"]))
    hint = refused.value.hint
    assert "-m" in hint and "'cluster.account=[a,b]'" in hint and "'cluster.account=\"a,b\"'" in hint
