"""The sliding window of a NeMo, Megatron-Bridge or Megatron-LM model.

``window_size=(W, 0)`` of megatron-core and Transformer Engine lets a query see the W tokens before it and
itself (query i sees keys i - W to i; NeMo's Gemma 2 masks so too, ``get_swa``), transformers' ``sliding_window=W`` W
tokens with itself (``kv_idx > q_idx - W``). It becomes W + 1 tokens of Megatron-LM, which has no importer, and of
Megatron-Bridge, whose importers and exporters reckon so since 0.4 (``conversion/utils.py``). NeMo's importers copy the
number nevertheless, and its exporters copy it back (convert_{mistral_7b,starcoder2,gemma2}_hf_to_nemo.py,
convert_{mistral_7b,starcoder2}_nemo_to_hf.py; NeMo 2, gpt/model/mistral.py and gemma2.py). NeMo's is copied here as
well, so that an imported model is what it was before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from export_scripts.checkpoints.nemo.config_file import CONFIG_FILE
from export_scripts.weights.values import positive, whole
from handover.errors import CheckpointError
from models.checks import quoted, shown

AS_CORE = "computes_as_megatron_core"
"""The readers' own word: a window and an expert's capacity are megatron-core's, not what NeMo's exporters write."""

AS_SAID = "windows_are_as_said"
"""The readers' own word: where norms stand behind attention, ``window_attn_skip_freq`` counts as it does elsewhere."""


def window_of(config: Mapping[str, Any]) -> int | None:
    """Read how many tokens before it a token sees; None: all, and megatron-core's word for that is -1."""
    window = config.get("window_size")
    if not isinstance(window, (list, tuple)) or not window or window[0] in (-1, None):
        return None
    return whole(window[0], f"{CONFIG_FILE}: window_size")


def read_windows(config: Mapping[str, Any], layers: int, is_gemma2: bool) -> tuple[int, ...]:
    """Read how many tokens a token sees in each layer, itself among them; 0: it sees all.

    Raises:
        CheckpointError: the number is none, or layers are listed and there are more.
    """
    seen = window_of(config)
    if seen is None:
        return (0,) * layers
    size = positive(seen + bool(config.get(AS_CORE)), f"{CONFIG_FILE}: window_size")
    skipped = config.get("window_attn_skip_freq")
    if is_gemma2:  # its attention reads no frequency
        return tuple(size * (number % 2 == 0) for number in range(layers))
    if isinstance(skipped, int) and skipped:
        return tuple(size * (number % skipped != 0) for number in range(1, layers + 1))
    if isinstance(skipped, (list, tuple)) and skipped:
        if len(skipped) < layers:
            raise CheckpointError(f"{CONFIG_FILE}: window_attn_skip_freq lists {len(skipped)} of {layers} layers")
        return tuple(size * bool(each) for each in skipped[:layers])
    if skipped:
        raise CheckpointError(
            f"{CONFIG_FILE}: window_attn_skip_freq is {quoted(skipped)}, not a number or a list of 0 and 1"
        )
    return (size,) * layers


def window_remarks(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what the number of a window means, in one line."""
    window = window_of(config)
    if window is None:
        return ()
    if config.get(AS_CORE):
        return (
            f"window_size {shown(config['window_size'])} becomes a window of {window + 1} tokens that counts the token "
            "itself, as megatron-core computes it",
        )
    return (
        f"window_size {shown(config['window_size'])} becomes a window of {window} tokens that counts the token itself, "
        "as NeMo's own exporters write it; a training by NeMo saw one token more",
    )
