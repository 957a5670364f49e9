"""A small XGLM of fairseq with its sentencepiece model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from support.tiny_models.huggingface_models import HEADS, HIDDEN, INTER, LAYERS, POSITIONS

ARGUMENTS = {
    "_name": "transformer_lm_gpt",
    "decoder_embed_dim": HIDDEN,
    "decoder_layers": LAYERS,
    "decoder_attention_heads": HEADS,
    "decoder_ffn_embed_dim": INTER,
    "decoder_input_dim": HIDDEN,
    "decoder_output_dim": HIDDEN,
    "decoder_normalize_before": True,
    "decoder_learned_pos": False,
    "share_decoder_input_output_embed": True,
    "no_scale_embedding": False,
    "activation_fn": "relu",
    "max_target_positions": POSITIONS,
}


def write(folder: Path, model: Any, pieces: bytes = b"", form: str = "cfg", **changes: Any) -> Path:
    """Write a model as fairseq does: output projection, a version and a marker of the type beside the weights."""
    state = {key.replace("model.", "decoder.", 1): value for key, value in model.state_dict().items()}
    state["decoder.output_projection.weight"] = state.pop("lm_head.weight")
    state |= {"decoder.version": torch.tensor([3.0]), "decoder.embed_positions._float_tensor": torch.zeros(1)}
    arguments = {**ARGUMENTS, **changes}
    beside = {"cfg": {"model": arguments}} if form == "cfg" else {"args": argparse.Namespace(**arguments)}
    folder.mkdir()
    torch.save({"model": state, "optimizer_history": [], "last_optimizer_state": None, **beside}, folder / "model.pt")
    (folder / "dict.txt").write_text("")
    if pieces:
        (folder / "sentencepiece.bpe.model").write_bytes(pieces)
    return folder
