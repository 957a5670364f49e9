"""The blocks that keep states, read from where a decoder's tensors are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from models.blocks.delta_rule import DeltaRule
from models.blocks.mamba import Mamba

from ...ops.delta_mixing import DeltaMixing
from ...ops.linear import Norm
from ...ops.mamba_mixing import MambaMixing
from ...ops.mamba_scan import MambaRecurrence
from ..blocks.state_mixers import DeltaWeights, MambaWeights, StateMixer
from ..config import ModelConfig
from ..hub_reader import HubReader
from ..reader import Reader

_BY_KEY = ("delta_in",), ("delta_gates",)
_BY_KIND = ("delta_qkv", "delta_z"), ("delta_b", "delta_a")


def read_state_mixer(read: Reader, config: ModelConfig, names: Mapping[str, str]) -> StateMixer | None:
    """Read a layer's block that keeps a state, of tensors named by role; None: it has none."""
    if not isinstance(read, HubReader):
        return None
    if config.mamba and "mamba_in" in names:
        return _mamba(read, config, config.mamba, names)
    if config.delta and "delta_conv" in names:
        return _delta_rule(read, config, config.delta, names)
    return None


def _mamba(read: HubReader, config: ModelConfig, kind: Mamba, names: Mapping[str, str]) -> MambaWeights:
    kind = replace(kind, head_num=kind.head_num // read.ranks, group_num=kind.group_num // read.ranks)
    conv, bias = f"{names['mamba_conv']}.weight", f"{names['mamba_conv']}.bias"
    norm, factors = None, config.multipliers.sections
    if kind.has_norm:
        weight = read.tensor(f"{names['mamba_norm']}.weight", torch.float32)
        norm = Norm(weight, None, kind.norm_eps or config.layernorm_eps, is_rms=True)
    into, sections = read.column_parallel(names["mamba_in"]), None
    if any(factor != 1 for factor in factors):
        rows = [read.empty((kind.widths[name],), torch.float32) for name in kind.in_sections]
        sections = torch.cat([part.fill_(factor) for part, factor in zip(rows, factors, strict=True)])
    mixing = MambaMixing(
        conv=read.tensor(conv, torch.float32).flatten(1),
        conv_bias=read.tensor(bias, torch.float32) if bias in read else None,
        recurrence=MambaRecurrence(_decay(read, names["mamba_decay"]), read.exact(names["mamba_skip"])),
        step_bias=read.exact(names["mamba_step"]),
        norm=norm,
        kind=kind,
    )
    return MambaWeights(into, mixing, read.row_parallel(names["mamba_output"]), sections)


def _delta_rule(read: HubReader, config: ModelConfig, kind: DeltaRule, names: Mapping[str, str]) -> DeltaWeights:
    heads = kind.key_head_num // read.ranks, kind.value_head_num // read.ranks
    kind = replace(kind, key_head_num=heads[0], value_head_num=heads[1])
    norm = read.tensor(f"{names['delta_norm']}.weight", torch.float32)
    into, rates = _BY_KIND if kind.is_by_kind else _BY_KEY
    mixing = DeltaMixing(
        conv=read.tensor(f"{names['delta_conv']}.weight", torch.float32).flatten(1),
        decay=_decay(read, names["delta_decay"]),
        step_bias=read.exact(names["delta_step"]),
        norm=Norm(norm, None, config.layernorm_eps, is_rms=True),
        kind=kind,
    )
    first, second = (read.column_parallel(*(names[role] for role in roles)) for roles in (into, rates))
    return DeltaWeights(first, mixing, read.row_parallel(names["delta_output"]), second)


def _decay(read: HubReader, name: str) -> Tensor:
    """Read what is stored as the logarithm of its opposite."""
    return -read.exact(name).exp()
