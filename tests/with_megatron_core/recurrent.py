"""megatron-core's own mixers of Mamba 2 and of the gated delta rule: what a rank holds of one, and what it saves.

Both ask for kernels that are built for GPUs and that saving does not call. What Transformer Engine fuses is fused here
in the same way: a norm's weight beside that of the linear layer behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from with_megatron_core.absent import stand_in
from with_megatron_core.bridge import source
from with_megatron_core.llama import without_cuda

PLACES = {"nemotron_h": "mixer", "qwen3_next": "self_attention"}


class _BehindNorm(ColumnParallelLinear):  # type: ignore[misc]
    """A linear layer with the norm in front of it, by Transformer Engine's name."""

    def __init__(self, width: int, *given: Any, **named: Any) -> None:
        super().__init__(width, *given, **named)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(width))


class _GatedNorm(torch.nn.Module):
    """The parameter of Mamba's own norm."""

    def __init__(self, width: int, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))


def prefixes(name: str) -> list[str]:
    """List what the keys of a model's recurrent layers begin with."""
    config = source(name).config
    kinds = getattr(config, "layers_block_type", None) or config.layer_types
    return [f"decoder.layers.{n}.{PLACES[name]}." for n, kind in enumerate(kinds) if kind == "linear_attention"]


def _config(config: Any, ranks: int) -> TransformerConfig:
    names = [key for key in dir(config) if key.startswith("linear_")]
    said = {key: getattr(config, key) for key in names}
    if config.model_type == "nemotron_h":
        said |= {"mamba_num_heads": config.mamba_num_heads, "mamba_head_dim": config.mamba_head_dim}
        said |= {"mamba_num_groups": config.n_groups, "mamba_state_dim": config.ssm_state_size}
    made = TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        normalization="RMSNorm",
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        tensor_model_parallel_size=ranks,
    )
    for key, value in said.items():
        setattr(made, key, value)
    return made


def _mixers(name: str, ranks: int) -> Iterator[tuple[str, Any]]:
    config, groups = source(name).config, ProcessGroupCollection.use_mpu_process_groups()
    core = _config(config, ranks)
    if PLACES[name] == "mixer":
        from megatron.core.ssm import mamba_mixer

        _GatedNorm.sharded_state_dict = mamba_mixer.ExtendedRMSNorm.sharded_state_dict  # type: ignore[attr-defined]
        mamba_mixer.ExtendedRMSNorm = _GatedNorm
        modules = mamba_mixer.MambaMixerSubmodules(in_proj=_BehindNorm, out_proj=RowParallelLinear)
        for prefix in prefixes(name):
            own = {"d_model": config.hidden_size, "layer_number": 1, "d_conv": config.conv_kernel}
            yield prefix, mamba_mixer.MambaMixer(core, modules, pg_collection=groups, **own)
        return
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules

    layers = GatedDeltaNetSubmodules(in_proj=_BehindNorm, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear)
    for prefix in prefixes(name):
        yield prefix, GatedDeltaNet(core, layers, layer_number=1, pg_collection=groups)


def work(rank: int, ranks: int, name: str, whole: Path, folder: Path) -> None:
    """One training rank: read its part of the mixers, and write what it holds and what all save."""
    source(name)  # before there are ranks: transformers then writes on the first alone
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    without_cuda()
    stand_in()
    held, saved = dict[str, torch.Tensor](), dict[str, Any]()
    for prefix, mixer in _mixers(name, ranks):
        own = {k: each for k, each in mixer.sharded_state_dict(prefix=prefix).items() if "_extra_state" not in k}
        read = dist_checkpointing.load(own, str(whole))
        told = mixer.load_state_dict({key.removeprefix(prefix): value for key, value in read.items()}, strict=False)
        assert not told.unexpected_keys and all("_extra_state" in key for key in told.missing_keys), told
        held |= {f"{prefix}{key}": value for key, value in mixer.state_dict().items() if "_extra_state" not in key}
        saved |= {k: each for k, each in mixer.sharded_state_dict(prefix=prefix).items() if k in own}
    torch.save(held, folder / f"rank{rank}.pt")
    (folder / "distributed").mkdir(exist_ok=True)
    dist_checkpointing.save(saved, str(folder / "distributed"))
    torch.distributed.destroy_process_group()
