"""Start and end tokens, beyond the vocabulary too, judged by transformers' ``generate``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints.nemo_archive import VOCAB, gpt_config, gpt_state, write_gpt, write_nemo
from support.engines.stranger import change_json, continuation, engine_of, section
from support.tiny_models.huggingface_models import greedy, save
from support.tiny_models.t5_models import huggingface_t5
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from export_scripts.arguments import ConvertArguments
from export_scripts.conversion.plan.check import inspect_source
from export_scripts.conversion.plan.special_ids import with_settled_ids
from export_scripts.convert import convert
from handover.errors import CheckpointError

PROMPT, COUNT = [11, 3, 95, 0, 42, 17], 6


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A model, and what follows PROMPT where nothing ends it."""
    path = tmp_path_factory.mktemp("gpt2")
    model = save("gpt2", path)
    return path, greedy(model, PROMPT, COUNT)[0]


def generated(path: Path) -> list[int]:
    """What transformers' generate makes of PROMPT."""
    model = AutoModelForCausalLM.from_pretrained(path)
    ids = torch.tensor([PROMPT])
    made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=COUNT)
    return list(made[0, len(PROMPT) :].tolist())


NEVER = 95
ENDS = {
    "generation_config.json goes before config.json": ({"eos_token_id": 2}, {"eos_token_id": 1}),
    "config.json alone": ({"eos_token_id": 2}, None),
    "beyond the vocabulary": ({"eos_token_id": 50256, "bos_token_id": 50256}, None),
    "none is named": ({"eos_token_id": None, "bos_token_id": None}, None),
    "the first of a list": ({"eos_token_id": NEVER}, {"eos_token_id": [1, NEVER]}),
}


@pytest.mark.parametrize("case", ENDS)
def test_a_text_ends_where_transformers_generate_ends_it(
    case: str, gpt2: tuple[Path, list[int]], tmp_path: Path
) -> None:
    path, free = gpt2
    config, generation = ENDS[case]

    def placed(values: dict[str, Any]) -> dict[str, Any]:
        """Numbers below COUNT stand for that place of the free continuation."""

        def one(value: Any) -> Any:
            return (
                [one(each) for each in value] if isinstance(value, list) else free[value] if value in (1, 2) else value
            )

        return {key: one(value) for key, value in values.items()}

    source = tmp_path / "source"
    source.mkdir()
    for file in path.iterdir():
        if file.name != "generation_config.json":
            (source / file.name).write_bytes(file.read_bytes())
    change_json(source / "config.json", **placed(config))
    if generation is not None:
        change_json(source / "generation_config.json", **placed(generation))
    with engine_of(source, tmp_path) as engine:
        assert continuation(engine, PROMPT, COUNT) == generated(source)
        start = int(section(tmp_path / "1-gpu")["start_id"])
        assert len(continuation(engine, [start], 1)) == 1, "an empty prompt is answered"


def test_what_an_id_beyond_the_vocabulary_means_is_said_and_another_can_be_given(
    gpt2: tuple[Path, list[int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, free = gpt2
    change_json(path / "generation_config.json", eos_token_id=96, bos_token_id=96)
    convert(ConvertArguments(path, tmp_path / "a/1-gpu", 1, "fp32"))
    said = capsys.readouterr().err
    assert "the end token 96 is beyond the vocabulary of 96: no text ends by itself; export.model.end_id=N" in said
    assert "the start token 96 is beyond the vocabulary: token 0 stands in for it; export.model.start_id=N" in said
    with engine_of(path, tmp_path / "b", start_id=5, end_id=free[1]) as engine:
        assert continuation(engine, PROMPT, COUNT) == free[: free.index(free[1]) + 1]
        assert section(tmp_path / "b/1-gpu")["start_id"] == "5"
    assert "beyond" not in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="export.model.end_id 96 is beyond the vocabulary of 96"):
        convert(ConvertArguments(path, tmp_path / "c/1-gpu", 1, "fp32", end_id=96))


def test_the_same_rule_holds_for_nemo(tmp_path: Path) -> None:
    tokenizer = {"vocab.json": b'{"<|endoftext|>": 50256, "a": 0}', "merges.txt": b"#version: 0.2\n"}
    path = write_nemo(tmp_path / "gpt.nemo", gpt_config(), {"model_weights.ckpt": gpt_state()}, files=tokenizer)
    source = with_settled_ids(inspect_source(path, 1, "fp32"))
    assert (source.ids.start_id, source.ids.end_id) == (0, 50256)
    assert f"the end token 50256 is beyond the vocabulary of {VOCAB}" in "\n".join(source.remarks)
    assert not with_settled_ids(inspect_source(write_gpt(tmp_path / "fine.nemo"), 1, "fp32")).remarks
    source = with_settled_ids(inspect_source(path, 1, "fp32"), end_id=3)
    assert (source.ids.start_id, source.ids.end_id, len(source.remarks)) == (3, 3, 1)


def test_a_t5_begins_and_ends_as_transformers_generate_does(tmp_path: Path) -> None:
    path = tmp_path / "source"
    huggingface_t5().save_pretrained(path)
    change_json(path / "config.json", eos_token_id=1, decoder_start_token_id=0, pad_token_id=0)
    change_json(path / "generation_config.json", eos_token_id=[7, 9], decoder_start_token_id=4, pad_token_id=0)
    judge = AutoModelForSeq2SeqLM.from_pretrained(path).generation_config
    source = with_settled_ids(inspect_source(path, 1, "fp32"))
    assert source.ids.start_id == judge.decoder_start_token_id
    assert [source.ids.end_id, *source.ids.more_end_ids] == judge.eos_token_id
    assert "a text ends with token 7, and with 9" in "\n".join(source.remarks)


@pytest.mark.parametrize("token", [-1, -7, 2**40])
def test_an_id_that_no_engine_reads_is_not_written(token: int, tmp_path: Path) -> None:
    save("gpt2", tmp_path / "source", eos_token_id=7, bos_token_id=5)
    for name in ("config.json", "generation_config.json"):
        change_json(tmp_path / "source" / name, eos_token_id=token, bos_token_id=token)
    convert(ConvertArguments(tmp_path / "source", tmp_path / "1-gpu", 1, "fp32"))
    said = section(tmp_path / "1-gpu")
    assert (said["start_id"], said["end_id"]) == ("0", "96"), "the first token, and one that never comes"
