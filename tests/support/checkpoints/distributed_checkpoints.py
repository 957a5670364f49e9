"""Distributed checkpoints as NeMo 2 and megatron-core lay them out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from support.checkpoints.nemo_samples import restore, unpacked

ZARR, TORCH_DIST = "gpt_mcore_te_dist.nemo", "mcore016_torch_dist.tar"


def nemo2(tmp_path: Path, **changes: Any) -> Path:
    """What megatron-core wrote into weights/, with a context/ beside it as NeMo 2.x's sources write it."""
    root = unpacked(restore(TORCH_DIST, tmp_path), tmp_path / "nemo2")
    source = unpacked(restore("gpt_mcore_te_plain.nemo", tmp_path), tmp_path / "source")
    tokenizer = root / "context/nemo_tokenizer"
    tokenizer.mkdir(parents=True)
    for name in ("vocab.json", "merges.txt"):
        next(source.glob(f"*_{name}")).rename(tokenizer / name)
    config = {
        "_target_": "nemo.collections.llm.gpt.model.base.GPTConfig",
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_query_groups": None,
        "ffn_hidden_size": None,
        "kv_channels": None,
        "layernorm_epsilon": 1e-5,
        "layernorm_zero_centered_gamma": False,
        "normalization": "LayerNorm",
        "add_bias_linear": True,
        "gated_linear_unit": False,
        "activation_func": {"_target_": "torch._C._nn.gelu", "_call_": False},
        "bias_activation_fusion": True,
        "num_moe_experts": None,
        "position_embedding_type": "learned_absolute",
        "share_embeddings_and_output_weights": True,
        "seq_length": 32,
        "virtual_pipeline_model_parallel_size": 2,
        **changes,
    }
    model = {
        "_target_": "nemo.collections.llm.gpt.model.base.GPTModel",
        "config": config,
        "tokenizer": {
            "_target_": "nemo.collections.common.tokenizers.huggingface.auto_tokenizer.AutoTokenizer",
            "pretrained_model_name": "nemo_tokenizer",
            "vocab_file": None,
            "merges_file": None,
        },
    }
    (root / "context/model.yaml").write_text(yaml.safe_dump(model))
    (root / "context/io.json").write_text("{}")
    return root
