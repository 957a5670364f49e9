"""NeMo's rotation and ALiBi: which of FasterTransformer's models expresses them, and that it computes the same."""

from __future__ import annotations

import configparser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support.shards.decoder_forward as decoder_forward
import torch
from support.checkpoints.megatron_core import core_forward
from support.checkpoints.nemo_archive import HEAD_SIZE, HEADS, LAYERS, VOCAB, gpt_config, write_nemo
from support.checkpoints.nemo_positions import IDS, turned, without_positions, write
from support.engines.network_runs import open_network, prefill_logits

from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints.formats import find_archive, open_source
from export_scripts.conversion.plan.check import inspect_source
from export_scripts.convert import convert
from handover.errors import CheckpointError
from models.blocks.rope_scaling import Linear
from models.blocks.rotary import Rotary
from models.decoder import Decoder


def legacy_names(state: dict[str, Any]) -> dict[str, Any]:
    """The same tensors under the keys of ``mcore_gpt: false``."""
    spelled = {
        "model.embedding.": "model.language_model.embedding.",
        "model.decoder.": "model.language_model.encoder.",
        "model.output_layer.": "model.language_model.output_layer.",
        "linear_qkv": "query_key_value",
        "linear_proj": "dense",
        "linear_fc1": "dense_h_to_4h",
        "linear_fc2": "dense_4h_to_h",
        "pre_mlp_layernorm": "post_attention_layernorm",
    }
    renamed = {}
    for key, value in state.items():
        for old, new in spelled.items():
            key = key.replace(old, new)
        renamed[key] = value
    return renamed


def assert_same(
    source: Path, expected: np.ndarray, tmp_path: Path, model_type: str = "GPT-NeoX"
) -> configparser.ConfigParser:
    for ranks in (1, 2):
        root = tmp_path / f"{ranks}-gpu"
        convert(ConvertArguments(source, root, ranks, "fp32"))
        assert np.abs(decoder_forward.forward(root, IDS) - expected).max() < 1e-4
        engine = prefill_logits(open_network(root, ranks, model_type), torch.from_numpy(IDS)).numpy()
        assert np.abs(engine - expected).max() < 1e-4
    parser = configparser.ConfigParser()
    parser.read(root / "config.ini")
    return parser


@pytest.mark.parametrize("groups", [2, HEADS])
@pytest.mark.parametrize("is_tied", [True, False])
def test_rotation_goes_to_gptneox(groups: int, is_tied: bool, tmp_path: Path) -> None:
    state = without_positions(groups)
    if not is_tied:
        state["model.output_layer.weight"] = torch.randn(VOCAB, HEADS * HEAD_SIZE)
    settings = {"position_embedding_type": "rope", "share_embeddings_and_output_weights": is_tied}
    expected = core_forward(state, IDS, groups, 0, turned(HEAD_SIZE))
    ini = assert_same(write(tmp_path / "g.nemo", state, num_query_groups=groups, **settings), expected, tmp_path)
    assert (ini["gptneox"]["rotary_embedding"], ini["gptneox"]["use_gptj_residual"]) == (str(HEAD_SIZE), "0")


def test_rotation_with_legacy_keys_and_layernorm1p(tmp_path: Path) -> None:
    state = without_positions()
    source = {**legacy_names(state), "model.language_model.rotary_pos_emb.inv_freq": torch.ones(1)}
    settings = {"position_embedding_type": "rope", "normalization": "layernorm1p"}
    expected = core_forward(state, IDS, HEADS, 1, turned(HEAD_SIZE))
    assert_same(write(tmp_path / "g.nemo", source, **settings), expected, tmp_path)


def wide_state(generator: torch.Generator) -> dict[str, Any]:
    """Heads of eight elements, so that a part of one can be rotated."""
    hidden = HEADS * 8
    shapes = {"self_attention.linear_qkv": (3 * hidden, hidden), "self_attention.linear_proj": (hidden, hidden)}
    shapes |= {"mlp.linear_fc1": (64, hidden), "mlp.linear_fc2": (hidden, 64)}

    def fresh(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / 4

    state = {"model.embedding.word_embeddings.weight": fresh(VOCAB, hidden)}
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            state |= {f"model.decoder.layers.{layer}.{name}.weight": fresh(*shape)}
            state |= {f"model.decoder.layers.{layer}.{name}.bias": fresh(shape[0])}
        for name in ("input_layernorm", "pre_mlp_layernorm"):
            state |= {f"model.decoder.layers.{layer}.{name}.{part}": fresh(hidden) for part in ("weight", "bias")}
    return state | {f"model.decoder.final_layernorm.{part}": fresh(hidden) for part in ("weight", "bias")}


def test_a_part_of_a_head_is_rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.checkpoints.megatron_core.HEAD_SIZE", 8)
    monkeypatch.setattr("support.checkpoints.megatron_core.HIDDEN", HEADS * 8)
    state = wide_state(torch.Generator().manual_seed(0))
    settings = {"hidden_size": HEADS * 8, "ffn_hidden_size": 64, "rotary_percentage": 0.5}
    source = write(tmp_path / "g.nemo", state, position_embedding_type="rope", **settings)
    ini = assert_same(source, core_forward(state, IDS, HEADS, 0, turned(4)), tmp_path)
    assert ini["gptneox"]["rotary_embedding"] == "4"


def test_alibi_is_a_variant_of_gpt(tmp_path: Path) -> None:
    state = without_positions()
    slopes = [2.0 ** (-8 * (head + 1) / HEADS) for head in range(HEADS)]  # NeMo's get_slopes of a power of two
    expected = core_forward(state, IDS, HEADS, 0, slopes=slopes)
    source = write_nemo(
        tmp_path / "g.nemo", gpt_config(position_embedding_type="alibi"), {"model_weights.ckpt": legacy_names(state)}
    )
    ini = assert_same(source, expected, tmp_path, "GPT")
    assert (ini["gpt"]["has_positional_encoding"], ini["gpt"]["use_attention_linear_bias"]) == ("0", "1")


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ({"rotary_base": 500000}, "layers.rotary", (Rotary(HEAD_SIZE, 500000.0),) * LAYERS),
        (
            {"seq_len_interpolation_factor": 2},
            "layers.rotary",
            (Rotary(HEAD_SIZE, 10000.0, Linear(2.0)),) * LAYERS,
        ),
        ({"layernorm_epsilon": 1e-6}, "norms.eps", 1e-6),
    ],
)
def test_rotations_that_gptneox_does_not_have_are_the_llama_familys(
    change: dict[str, Any], field: str, value: object, tmp_path: Path
) -> None:
    source = write(tmp_path / "g.nemo", without_positions(), position_embedding_type="rope", **change)
    dims = open_source(find_archive(source)).dims
    assert isinstance(dims, Decoder) and dims.norms.kind == "layernorm"
    assert dims.fields()[field] == value


def test_a_rotation_of_no_pairs_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "g.nemo", without_positions(), position_embedding_type="rope", rotary_percentage=0.5)
    with pytest.raises(CheckpointError, match="rotates 1 of a head's 2 elements"):
        inspect_source(source, 1, "fp32")
