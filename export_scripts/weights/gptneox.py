"""FasterTransformer's GPT-NeoX: its layout, declared once, and its ``config.ini``.

Layout: FasterTransformer, GptNeoXWeight.cc and GptNeoXDecoderLayerWeight.cc (``loadModel``); keys:
GptNeoXTritonModel.cc. With ``use_gptj_residual`` one bias stands for those of attention and feed-forward, and
GptNeoXDecoder.cc adds it on every rank before it sums the ranks.
"""

from __future__ import annotations

from export_scripts.weights import gpt, gptj
from export_scripts.weights.family import ConfigValues, Family
from export_scripts.weights.schema import ModelDims, TargetTensor, in_every_layer
from ft_format.config_ini import Sections

_PARALLEL_LAYER = {
    **{
        name: target
        for name, target in gpt.LAYER.items()
        if name not in ("attention.dense.bias", "mlp.dense_4h_to_h.bias")
    },
    "mlp.attention.bias.sum": TargetTensor(("hidden_units",), is_summed=True),
}


def schema(dims: ModelDims) -> dict[str, TargetTensor]:
    """List every tensor of a model by name, without ``.<rank>.bin``."""
    return {**gptj.OUTER, **in_every_layer(_PARALLEL_LAYER if dims.use_gptj_residual else gpt.LAYER, dims.num_layer)}


def config(values: ConfigValues) -> Sections:
    """List ``config.ini``: the keys of FasterTransformer's converter in its order, then those it leaves out.

    FasterTransformer computes GPT-NeoX's norms with an epsilon of 1e-5 and reads no other.
    """
    return gptj.rotary_sections("gptneox", values, use_gptj_residual=int(values.dims.use_gptj_residual))


FAMILY = Family("gptneox", schema, config)
