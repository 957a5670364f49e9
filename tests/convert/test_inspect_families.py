"""What ``inspect`` prints of one checkpoint of each Llama-like model; docs/sources.md shows a refusal."""

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
# What differs from a Llama 1 in its dimensions, by case.
CASES = (
    (Case("llama_mha", "legacy, two matrices", 2), ""),
    (Case("llama_linear", "core", 2, 2), "kv_head_num 4, rope_type linear, rope_scaling_factor 4.0"),
    (Case("llama31", "torch_dist", 2), "kv_head_num 4, rope_theta 500000.0, rope_type llama3, rope_scaling_factor 8.0"),
    (
        Case("llama32", "NeMo 2"),
        "kv_head_num 4, has_untied_head False, rope_theta 500000.0, rope_type llama3, rope_scaling_factor 32.0",
    ),
    (
        Case("mistral", "zarr"),
        "kv_head_num 4, size_per_head 16, rotary_embedding 16, rope_theta 1000000.0, attention_window 5",
    ),
    (
        Case("nemotron", "core", 4),
        "kv_head_num 4, rotary_embedding 4, layernorm_type layernorm, has_zero_centred_norms True, "
        "activation_type squared_relu, is_gated False",
    ),
    (Case("qwen2", "NeMo 2, layers apart", 2), "kv_head_num 4, rope_theta 1000000.0, has_qkv_bias True"),
    (
        Case("qwen3", "NeMo 2, layers apart, gate and up apart"),
        "kv_head_num 4, size_per_head 16, rotary_embedding 16, rope_theta 1000000.0, qk_norm True",
    ),
    (
        Case("gemma", "core", 2),
        "kv_head_num 4, size_per_head 16, rotary_embedding 16, has_untied_head False, activation_type gelu, "
        "embedding_scale 8.0",
    ),
    (
        Case("gemma2", "NeMo 2", 2),
        "kv_head_num 4, size_per_head 16, rotary_embedding 16, has_untied_head False, has_zero_centred_norms "
        "True, activation_type gelu, has_output_norms True, embedding_scale 8.0, attention_scalar 24.0, "
        "attn_logit_softcap 2.0, final_logit_softcap 3.0, attention_window 5, attention_window_layers 10",
    ),
    (
        Case("starcoder2", "Megatron-LM", 2, 2),
        "kv_head_num 4, rope_theta 100000.0, layernorm_type layernorm, activation_type gelu, is_gated False, "
        "has_qkv_bias True, has_dense_bias True, has_mlp_bias True, attention_window 5",
    ),
    (
        Case("mixtral", "Megatron-LM, torch_dist", 2),
        "kv_head_num 4, rope_theta 1000000.0, expert_num 4, experts_per_token 2",
    ),
)
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


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("case", "wanted"), CASES, ids=str)
def test_inspect_prints_what_differs(
    case: Case, wanted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, family, dims = printed(case, tmp_path / "own", capsys)
    plain = printed(Case("llama_mha", "core"), tmp_path / "plain", capsys)[2]
    assert kind == ("NeMo Llama with legacy keys" if case.form.startswith("legacy") else "megatron-core Llama")
    assert family == "llama"
    assert ", ".join(f"{key} {value}" for key, value in dims.items() if value != plain[key]) == wanted


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
