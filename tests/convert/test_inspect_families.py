"""What ``inspect`` prints of one checkpoint of each Llama-like model is what docs/sources.md shows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.llama_files import write_huggingface_tokenizer
from support.llama_models import save
from support.llama_sources import Case, write_source

from export_scripts.inspect import main
from handover.errors import CheckpointError

DOCUMENT = Path(__file__).resolve().parents[2] / "docs/sources.md"
CASES = [
    Case("llama_mha", "legacy, two matrices", 2),
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
]
# The rest is the same in all of these tiny models.
SHOWN = (
    *("kv_head_num", "size_per_head", "rotary_embedding", "has_untied_head", "rope_theta", "rope_type"),
    *("rope_scaling_factor", "layernorm_type", "has_zero_centred_norms", "activation_type", "is_gated", "has_qkv_bias"),
    *("has_dense_bias", "has_mlp_bias", "qk_norm", "has_output_norms", "embedding_scale", "attention_scalar"),
    *("attn_logit_softcap", "final_logit_softcap", "attention_window", "attention_window_layers", "expert_num"),
    "experts_per_token",
)


def printed(case: Case, folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, str, dict[str, str]]:
    """Format, family and dimensions, as inspect writes them."""
    folder.mkdir()
    path = write_source(case, folder / "source")
    write_huggingface_tokenizer(folder / "tokenizer")
    capsys.readouterr()
    main([str(path), f"--tokenizer={folder / 'tokenizer'}"])
    lines = dict(line.strip().split("  ", 1) for line in capsys.readouterr().out.splitlines()[1:4])
    dims = dict(re.findall(r"(?:^|\s)(\w+) (\S+)", lines["dimensions"]))
    return lines["format"].strip(), lines["family"].strip(), {key: dims[key] for key in SHOWN}


def test_the_document_has_a_row_of_each() -> None:
    rows = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| `inspect` of ")]
    assert [row.split("|")[1].strip().removeprefix("`inspect` of ") for row in rows] == [
        f"{case.name}, {case.form}, {case.tensor} x {case.pipeline}" for case in CASES
    ]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_row_is_what_inspect_prints(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kind, family, dims = printed(case, tmp_path / "own", capsys)
    plain = printed(Case("llama_mha", "core"), tmp_path / "plain", capsys)[2]
    words = [f"{key} {value}" for key, value in dims.items() if value != plain[key]]
    title = f"{case.name}, {case.form}, {case.tensor} x {case.pipeline}"
    assert family == "llama"
    wanted = f"| `inspect` of {title} | {kind} | {', '.join(words) or 'none'} |"
    assert wanted in DOCUMENT.read_text().splitlines(), wanted


def test_the_document_shows_what_a_refusal_prints(tmp_path: Path) -> None:
    save("llama", tmp_path / "llama")
    file = tmp_path / "llama/config.json"
    config = json.loads(file.read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 2.0}, "partial_rotary_factor": 0.5}
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as refused:
        main([str(file.parent)])
    assert f"```\n{refused.value.problem}\n```" in DOCUMENT.read_text()
