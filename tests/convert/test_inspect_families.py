"""What ``inspect`` prints of one checkpoint of each Llama-like model; docs/sources.md shows a refusal."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from support.checkpoints.llama_files import write_huggingface_tokenizer
from support.checkpoints.llama_sources import Case, write_source
from support.tiny_models.llama_models import save

from export_scripts.inspect import main
from handover.errors import CheckpointError

SIZES = {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"}
DOCUMENT = Path(__file__).resolve().parents[2] / "docs/sources.md"
CASES = (
    Case("llama_linear", "core", 2, 2),
    Case("llama31", "torch_dist", 2),
    Case("llama32", "NeMo 2"),
    Case("mistral", "zarr"),
    Case("nemotron", "core", 4),
    Case("qwen2", "NeMo 2, layers apart", 2),
    Case("qwen3", "NeMo 2, layers apart, gate and up apart"),
    Case("gemma", "core", 2),
    Case("gemma2", "NeMo 2", 2),
    Case("starcoder2", "Megatron-LM", 2, 2),
    Case("mixtral", "Megatron-LM, torch_dist", 2),
    Case("llama_mha", "legacy, two matrices", 2),
)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_inspect_prints_the_dimensions_in_the_words_of_transformers(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_source(case, tmp_path / "source")
    write_huggingface_tokenizer(tmp_path / "tokenizer")
    capsys.readouterr()
    main([str(path), f"--tokenizer={tmp_path / 'tokenizer'}"])
    lines = dict(line.strip().split("  ", 1) for line in capsys.readouterr().out.splitlines()[1:4])
    kind = lines["format"].strip()
    assert kind == ("NeMo Llama with legacy keys" if case.form.startswith("legacy") else "megatron-core Llama")
    assert lines["family"].strip() == "llama"
    printed = dict(each.split(" ", 1) for each in lines["dimensions"].strip().split("  "))
    rope, theirs = printed.pop("rope_scaling"), case.source.config.to_dict()
    assert theirs["rope_parameters"]["rope_type"] in (ast.literal_eval(rope) or {"rope_type": "default"}).values()
    assert printed.pop("rope_theta") == str(theirs["rope_parameters"]["rope_theta"])
    assert int(printed.pop("vocab_size")) >= theirs["vocab_size"]  # with the rows that training added
    without_effect = {"max_window_layers"} if printed.get("use_sliding_window") == "False" else set()
    compared = printed.keys() & {key for key, value in theirs.items() if value is not None} - without_effect
    assert {*SIZES, "model_type", "tie_word_embeddings"} <= compared
    assert {key: printed[key] for key in compared} == {key: str(theirs[key]) for key in compared}


def test_the_document_shows_what_a_refusal_prints(tmp_path: Path) -> None:
    save("llama", tmp_path / "llama")
    file = tmp_path / "llama/config.json"
    config = json.loads(file.read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 1e4, "rope_scaling": {"type": "proportional"}, "partial_rotary_factor": 0.5}
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as refused:
        main([str(file.parent)])
    assert f"```\n{refused.value.problem}\n```" in DOCUMENT.read_text()
