"""FasterTransformer's GPT-NeoX: its layout, declared once, and its ``config.ini``.

Layout: FasterTransformer, GptNeoXWeight.cc and GptNeoXDecoderLayerWeight.cc (``loadModel``); keys:
GptNeoXTritonModel.cc. With ``use_gptj_residual`` one bias stands for those of attention and feed-forward, and
GptNeoXDecoder.cc adds it on every rank before it sums the ranks.
"""

from __future__ import annotations

from collections.abc import Callable

from ft_format.config_ini import ConfigIni, Sections
from ft_format.families import gpt, gptj
from ft_format.families.family import ConfigValues, Family
from ft_format.families.gpt import GptDims
from ft_format.layout import TensorSpec, in_every_layer

_PARALLEL_LAYER = {
    **{
        name: target
        for name, target in gpt.LAYER.items()
        if name not in ("attention.dense.bias", "mlp.dense_4h_to_h.bias")
    },
    "mlp.attention.bias.sum": TensorSpec(("hidden_units",), is_summed=True),
}


def schema(dims: GptDims) -> dict[str, TensorSpec]:
    """List every tensor of a model by name, without ``.<rank>.bin``."""
    return {**gptj.OUTER, **in_every_layer(_PARALLEL_LAYER if dims.use_gptj_residual else gpt.LAYER, dims.num_layer)}


def config(values: ConfigValues) -> Sections:
    """List ``config.ini``: the keys of FasterTransformer's converter in its order, then those it leaves out.

    FasterTransformer computes GPT-NeoX's norms with an epsilon of 1e-5 and reads no other.
    """
    return gptj.rotary_sections("gptneox", values, use_gptj_residual=int(values.dims.use_gptj_residual))


def read(ini: ConfigIni, has: Callable[[str], bool], position_num: int | None = None) -> GptDims:
    """Read the dimensions; keys and defaults are those of GptNeoXTritonModel.cc, the epsilon a constant there."""
    return gptj.read_rotary(ini, "gptneox", 1e-5)


FAMILY = Family(
    "gptneox",
    schema,
    config,
    read,
    sections=("gptneox",),
    model_types=("GPT-NeoX",),
    uses_prefixes=True,
)
