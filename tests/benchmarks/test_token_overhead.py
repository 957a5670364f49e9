"""The made-up store that the path is measured with, and the arithmetic of its figures."""

from __future__ import annotations

from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from benchmarks.serving.made_up_repository import EMPTY, write_empty_models, write_repository
from benchmarks.serving.token_overhead import Arrivals, make_prompt, medians, prompts_of
from evaluation.speed.prompts.workload import LoadPrompt


def test_each_empty_model_has_the_tensors_and_steps_of_the_one_it_stands_for(tmp_path: Path) -> None:
    repository = write_repository(tmp_path, (1, 16, 2), "fp32", 1 << 20)
    write_empty_models(repository)
    models = {}
    for path in repository.glob("*/config.pbtxt"):
        models[path.parent.name] = text_format.Parse(path.read_text(), model_config_pb2.ModelConfig())
        assert (path.parent / "1").is_dir()
    real = {name: model for name, model in models.items() if not name.startswith(EMPTY)}
    assert set(models) == set(real) | {EMPTY + name for name in real} and len(real) == 4
    assert real["fastertransformer"].parameters["kv_cache_bytes"].string_value == str(1 << 20)
    for name, model in real.items():
        empty = models[EMPTY + name]
        assert (empty.input, empty.output) == (model.input, model.output)
        assert empty.model_transaction_policy == model.model_transaction_policy
        assert [step.model_name for step in empty.ensemble_scheduling.step] == [
            EMPTY + step.model_name for step in model.ensemble_scheduling.step
        ]
        if empty.backend:
            compile((repository / empty.name / "1" / "model.py").read_text(), name, "exec")
    prompt = make_prompt(repository, 40, 8)
    assert (len(prompt.ids), prompt.output_length, prompt.text[:8]) == (40, 8, "The ship")


def test_a_further_token_takes_what_lies_between_the_first_answer_and_the_last() -> None:
    each = Arrivals(1_000_000, (3_000_000, 4_000_000, 9_000_000), tokens=4)  # one answer brought two tokens
    assert (each.first_ms, each.further_ms) == (2.0, 2.0)
    slow, slower = (Arrivals(0, (first, first + 3_000_000), 2) for first in (5_000_000, 9_000_000))
    assert medians([each, slow, slower]) == (5.0, 3.0)


def test_prompts_that_are_not_alike_have_the_same_tokens_and_nothing_in_common_with_any_before() -> None:
    prompt = LoadPrompt(tuple(range(60)), 8, "a text")
    assert prompts_of(prompt, 3, are_alike=True) == [prompt] * 3
    own = [*prompts_of(prompt, 20, are_alike=False), *prompts_of(prompt, 20, are_alike=False)]
    assert len({each.ids[:16] for each in own}) == 40  # a page of the prefix cache
    assert all((sorted(each.ids), each.output_length, each.text) == ([*range(60)], 8, "") for each in own)
