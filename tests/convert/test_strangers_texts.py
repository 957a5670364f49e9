"""Text to text as transformers does it, where a tokenizer puts tokens around a text."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engines.stranger import change_json, continuation, engine_of
from support.servers.fake_pb_utils import FakePbUtils, FakeRequest
from support.tiny_models.huggingface_models import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, AutoTokenizer

from evaluation.client.tokenizer import load_tokenizer
from export_scripts.arguments import ConvertArguments, ExportArguments
from export_scripts.conversion.plan.check import inspect_source
from export_scripts.conversion.plan.special_ids import with_settled_ids
from export_scripts.convert import convert
from export_scripts.repository.model_repository import build_repository
from handover.errors import CheckpointError
from handover.text_ids import TEXT_IDS_FILE

BEGIN, END, OTHER_END = 90, 91, 92
VOCABULARY = {**{chr(ord("!") + index): index for index in range(90)}, "</s>": BEGIN, "<e>": END, "<f>": OTHER_END}
PROMPT, COUNT = "Hello_there", 6
NAMES = {"bos_token": "</s>", "eos_token": "<e>", "unk_token": "<e>"}


def by_file(*post_processors: Any) -> Callable[[Path], None]:
    """Write tokenizer.json."""

    def write(path: Path) -> None:
        made = Tokenizer(models.BPE(VOCABULARY, []))
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        made.add_special_tokens(["</s>", "<e>", "<f>"])
        if post_processors:
            made.post_processor = processors.Sequence(list(post_processors))
        made.save(str(path / "tokenizer.json"))
        (path / "tokenizer_config.json").write_text(json.dumps({**NAMES, "add_bos_token": True}))

    return write


def by_config(**config: Any) -> Callable[[Path], None]:
    """Write vocab.json, merges.txt and tokenizer_config.json, as OPT has them."""

    def write(path: Path) -> None:
        (path / "vocab.json").write_text(json.dumps(VOCABULARY))
        (path / "merges.txt").write_text("#version: 0.2\n")
        (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer", **NAMES, **config}))

    return write


TEMPLATE = processors.TemplateProcessing(single="</s> $A", pair="</s> $A </s> $B", special_tokens=[("</s>", BEGIN)])
AROUND = processors.TemplateProcessing(
    single="</s> $A <f>", pair="$A $B", special_tokens=[("</s>", BEGIN), ("<f>", OTHER_END)]
)
CASES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "OPT: add_bos_token": ("opt", by_config(add_bos_token=True)),
    "add_bos_token is false": ("opt", by_config(add_bos_token=False)),
    "a template": ("opt", by_file(TEMPLATE)),
    "a template behind bytes": ("gpt2", by_file(processors.ByteLevel(), TEMPLATE)),
    "tokens before and behind": ("gpt2", by_file(AROUND)),
    "no post-processor": ("gpt2", by_file()),
    "GPT-NeoX has none of its own": ("gpt_neox", by_file(TEMPLATE)),
}


def model_of(repository: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model of the repository as Triton's stub loads it."""
    folder = repository / name / "1"
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", FakePbUtils("triton_python_backend_utils"))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "slipway_tokenizer", raising=False)
    spec = importlib.util.spec_from_file_location(f"stub_{name}", folder / "model.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.TritonPythonModel()
    ids = {"start_id": {"string_value": "90"}, "end_id": {"string_value": "91"}}
    model.initialize({"model_config": json.dumps({"parameters": ids, "input": [{"dims": [-1]}]})})
    return model


def outputs_of(model: Any, **tensors: np.ndarray) -> dict[str, np.ndarray]:
    (response,) = model.execute([FakeRequest(tensors, ("OUTPUT",))])
    outputs: dict[str, np.ndarray] = response.outputs
    return outputs


@pytest.mark.parametrize("case", CASES)
def test_text_to_text_is_what_transformers_makes_of_it(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, write = CASES[case]
    source = tmp_path / "source"
    save(family, source, tokenizer=False, bos_token_id=BEGIN, eos_token_id=END)
    write(source)
    tokenizer, model = AutoTokenizer.from_pretrained(source), AutoModelForCausalLM.from_pretrained(source)
    asked = tokenizer(PROMPT, return_tensors="pt")
    made = model.generate(**asked, do_sample=False, max_new_tokens=COUNT)[0].tolist()
    expected = tokenizer.decode(made, skip_special_tokens=True)
    with engine_of(source, tmp_path) as engine:
        shards = tmp_path / "1-gpu"
        assert load_tokenizer(shards).encode(PROMPT) == asked["input_ids"][0].tolist()
        build_repository(ExportArguments(shards, tmp_path / "repo", "m", 1, 1, "fp32", 0, 0, 8))
        before = model_of(tmp_path / "repo", "preprocessing", monkeypatch)
        read = outputs_of(
            before,
            QUERY=np.array([[PROMPT.encode()]], object),
            REQUEST_OUTPUT_LEN=np.array([[COUNT]], np.uint32),
        )
        ids = read["INPUT_ID"][0].tolist()
        assert ids == asked["input_ids"][0].tolist()
        tokens = ids + continuation(engine, ids, COUNT)
    text = outputs_of(
        model_of(tmp_path / "repo", "postprocessing", monkeypatch),
        TOKENS_BATCH=np.array([[tokens]], np.uint32),
        RESPONSE_INPUT_LENGTHS=np.array([[len(ids)]], np.int32),
        SEQUENCE_LENGTH=np.array([[len(tokens)]], np.uint32),
    )["OUTPUT"]
    assert [each.decode() for each in text] == [expected]


def test_a_text_ends_with_any_of_several_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    save("gpt2", source, tokenizer=False, bos_token_id=BEGIN, eos_token_id=END)
    by_config()(source)
    free_tokenizer, model = AutoTokenizer.from_pretrained(source), AutoModelForCausalLM.from_pretrained(source)
    asked = free_tokenizer(PROMPT, return_tensors="pt")
    free = model.generate(**asked, do_sample=False, max_new_tokens=COUNT)[0].tolist()
    third = free[asked["input_ids"].shape[1] + 2]
    change_json(source / "generation_config.json", eos_token_id=[END, third])
    judge = AutoModelForCausalLM.from_pretrained(source)
    expected = judge.generate(**asked, do_sample=False, max_new_tokens=COUNT)[0].tolist()
    with engine_of(source, tmp_path) as engine:
        build_repository(ExportArguments(tmp_path / "1-gpu", tmp_path / "repo", "m", 1, 1, "fp32", 0, 0, 8))
        read = outputs_of(
            model_of(tmp_path / "repo", "preprocessing", monkeypatch),
            QUERY=np.array([[PROMPT.encode()]], object),
            REQUEST_OUTPUT_LEN=np.array([[COUNT]], np.uint32),
        )
        ids = read["INPUT_ID"][0].tolist()
        tokens = ids + continuation(engine, ids, COUNT, stop_words_list=read["STOP_WORDS_IDS"])
    assert tokens == expected
    text = outputs_of(
        model_of(tmp_path / "repo", "postprocessing", monkeypatch),
        TOKENS_BATCH=np.array([[tokens]], np.uint32),
        RESPONSE_INPUT_LENGTHS=np.array([[len(ids)]], np.int32),
        SEQUENCE_LENGTH=np.array([[len(tokens)]], np.uint32),
    )["OUTPUT"]
    assert [each.decode() for each in text] == [free_tokenizer.decode(expected[:-1])]


def test_the_tokens_go_along_to_another_cut_and_are_said(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save("opt", source, tokenizer=False)
    by_config(add_bos_token=True)(source)
    said = "\n".join(with_settled_ids(inspect_source(source, 1, "fp32")).remarks)
    assert "the tokenizer puts [90] before a text, and so do the models for text" in said
    convert(ConvertArguments(source, tmp_path / "1-gpu", 1, "fp32"))
    convert(ConvertArguments(tmp_path / "1-gpu", tmp_path / "2-gpu", 2, "fp32"))
    assert (tmp_path / "2-gpu" / TEXT_IDS_FILE).read_bytes() == (tmp_path / "1-gpu" / TEXT_IDS_FILE).read_bytes()
    assert load_tokenizer(tmp_path / "2-gpu").encode_part("ab") == load_tokenizer(tmp_path / "2-gpu").encode("ab")[1:]


def test_a_token_that_no_file_has_is_refused(tmp_path: Path) -> None:
    save("opt", tmp_path, tokenizer=False)
    by_config(add_bos_token=True, bos_token="<nowhere>")(tmp_path)
    with pytest.raises(CheckpointError, match="puts bos_token '<nowhere>' into every text, and no file has its id"):
        inspect_source(tmp_path, 1, "fp32")


def test_a_conversation_begins_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("opt", tmp_path / "source", tokenizer=False)
    by_config(add_bos_token=True)(tmp_path / "source")
    convert(ConvertArguments(tmp_path / "source", tmp_path / "1-gpu", 1, "fp32"))
    build_repository(ExportArguments(tmp_path / "1-gpu", tmp_path / "repo", "m", 1, 1, "fp32", 0, 0, 8))
    model = model_of(tmp_path / "repo", "preprocessing", monkeypatch)
    model._has_axis = True
    tensors = {"QUERY": np.array([[[b"ab"]]], object), "REQUEST_OUTPUT_LEN": np.array([[[3]]], np.uint32)}
    rows = []
    for flags in (1, 0):
        (response,) = model.execute([FakeRequest(tensors, flags=flags)])
        rows.append(response.outputs["INPUT_ID"].tolist())
    assert rows == [[[[BEGIN, 64, 65]]], [[[64, 65]]]]
