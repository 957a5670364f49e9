"""Nemotron-H, Nano 2 and Nemotron 3: each layer is one of Mamba 2, attention, a feed-forward or experts.

Keys and defaults: transformers, ``configuration_nemotron_h.py``. Files have the names that it saves, below
``backbone.``. Layers that predict further tokens (``mtp.``) stand beside the others; its class passes over them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from models.architecture import Architecture
from models.blocks import mamba, mixture
from models.blocks.attention import Heads
from models.blocks.feed_forward import Function
from models.blocks.mixture import SIGMOID, Experts, Groups
from models.blocks.predictor import WITHIN, PredictorPattern
from models.checks import quoted
from models.config_json import MOST_LAYERS, ConfigJson
from models.errors import ModelError
from models.keys import Constants, Fields, Key, Keys, OfBlock, flag

SYMBOLS = {"M": ("mamba",), "*": ("attention",), "-": ("feed_forward",), "E": ("mixture",)}
"""Blocks of a layer by the letter that stands for it, of the hub's pattern and of megatron-core's."""
_LETTERS: Mapping[tuple[str, ...], str] = {blocks: letter for letter, blocks in SYMBOLS.items()}
_WORDS = {
    **{"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*"},
    **{"mlp": "-", "moe": "E"},
}


class Pattern(Keys):
    """How many layers there are, and what each of them is: a letter each, or a word each, which goes before."""

    says: ClassVar[tuple[str, ...]] = ("num_layer", "layers.blocks", "layers.rotary")
    _PATTERN, _LIST = "hybrid_override_pattern", "layers_block_type"

    def read(self, config: ConfigJson) -> dict[str, Any]:
        letters = self.letters(config)
        if strange := sorted({each for each in letters if each not in SYMBOLS}):
            raise ModelError(f"config.json: layers are {', '.join(strange)}", f"there are {', '.join(SYMBOLS)}")
        if not 0 < len(letters) <= MOST_LAYERS:
            raise ModelError(f"config.json: {self._PATTERN} says {len(letters)} layers", f"at most {MOST_LAYERS:,}")
        blocks = tuple(SYMBOLS[each] for each in letters)
        return dict(zip(self.says, (len(letters), blocks, (None,) * len(letters)), strict=True))

    def write(self, fields: Fields) -> dict[str, Any]:
        layers, blocks, _ = (fields[name] for name in self.says)
        return {"num_hidden_layers": layers, self._PATTERN: "".join(_LETTERS[each] for each in blocks)}

    def lacks(self, fields: Fields) -> list[str]:
        _, blocks, rotaries = (fields[name] for name in self.says)
        kinds = sorted({"+".join(each) for each in blocks} - {each for (each,) in SYMBOLS.values()})
        found = [f"{self.says[1]}: {', '.join(kinds)}  (a layer is one block)"] if kinds else []
        if any(rotary for rotary, each in zip(rotaries, blocks, strict=True) if "attention" in each):
            found.append(f"{self.says[2]}: rotated  (its attention has no positions)")
        return found

    def letters(self, config: ConfigJson) -> Sequence[str]:
        """Read what the layers are, unchecked."""
        if (listed := config.get(self._LIST)) is not None:
            if not isinstance(listed, (list, tuple)):
                raise ModelError(f"config.json: {self._LIST} is {quoted(listed)}, not a list")
            return [_WORDS.get(str(word), str(word)) for word in listed]
        pattern = config.get(self._PATTERN)
        if not isinstance(pattern, str):
            raise ModelError(f"config.json: {self._PATTERN} is {quoted(pattern)}, not a text")
        return pattern


class SharedWidth(Keys):
    """The feed-forward that every token uses, by its width, and the width in which experts work."""

    says: ClassVar[tuple[str, ...]] = ("mixture.shared_inter_size", "mixture.latent_size")
    _SHARED, _LATENT = "moe_shared_expert_intermediate_size", "moe_latent_size"

    def read(self, config: ConfigJson) -> dict[str, Any]:
        latent = 0 if config.get(self._LATENT) is None else config.size(self._LATENT)
        return dict(zip(self.says, (config.size(self._SHARED), latent), strict=True))

    def write(self, fields: Fields) -> dict[str, Any]:
        shared, latent = (fields[name] for name in self.says)
        return {"n_shared_experts": 1, self._SHARED: shared, self._LATENT: latent or None}

    def lacks(self, fields: Fields) -> list[str]:
        has_bias = fields["feed_forward.has_bias"]
        found = [] if fields[self.says[0]] else [f"{self.says[0]}: 0  (every token uses it)"]
        return found + (["feed_forward.has_bias: True  (beside experts that have none)"] if has_bias else [])

    def problems(self, config: ConfigJson) -> list[str]:
        return ["mlp_bias: True  (beside experts that have none)"] if config.get("mlp_bias") else []


_PATTERN = Pattern()


class OfLayers(OfBlock):
    """Keys of a block that some layers are; the pattern says how many layers there are, and no other key."""

    def __init__(self, block: str, keys: tuple[Keys, ...]) -> None:
        letter = _LETTERS[block,]
        super().__init__(block, keys, lambda config: letter in _PATTERN.letters(config))

    def read(self, config: ConfigJson) -> dict[str, Any]:
        return super().read(_counted(config))

    def problems(self, config: ConfigJson) -> list[str]:
        return super().problems(_counted(config))


def _counted(config: ConfigJson) -> ConfigJson:
    return ConfigJson({**config, "num_hidden_layers": len(_PATTERN.letters(config))})


_EXPERTS = (
    Experts(count="n_routed_experts"),
    SharedWidth(),
    Groups(),
    Key("norm_topk_prob", "mixture.is_normalised", flag, unset=False),
    Key("routed_scaling_factor", "mixture.scale", ConfigJson.number),
)
NEMOTRON_H = Architecture(
    model_type="nemotron_h",
    class_name="NemotronHForCausalLM",
    also={"mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias"},  # SGLang's
    instead={  # SGLang has the words of the hub's files, mamba and attention, and transformers 5 saves others
        **dict.fromkeys(("layers_block_type", "layer_types"), "hybrid_override_pattern"),
        "mtp_layers_block_type": "mtp_hybrid_override_pattern",
    },
    passes_over=("mtp.*",),
    keys=(
        Key("vocab_size", "vocab_size"),
        Key("hidden_size", "hidden_units"),
        Key("intermediate_size", "feed_forward.inter_size"),
        _PATTERN,
        Heads(),
        Function(key="mlp_hidden_act"),
        Key("mlp_bias", "feed_forward.has_bias", flag, unset=False),
        Key("max_position_embeddings", "max_positions", unset=4096),
        Key("layer_norm_epsilon", "norms.eps", ConfigJson.epsilon),
        OfLayers("mamba", mamba.KEYS),
        OfLayers("mixture", _EXPERTS),
        PredictorPattern(_LETTERS, _WORDS),
        Constants({"attention_bias": False, "tie_word_embeddings": False, "mamba_hidden_act": "silu"}),
    ),
    has={
        "feed_forward.is_gated": False,
        "mixture.is_gated": False,
        "mixture.scoring": SIGMOID,
        "mixture.has_choice_bias": True,
    },
    names={
        **{"embedding": "backbone.embeddings", "layer": "backbone.layers.{layer}", "final_norm": "backbone.norm_f"},
        **dict.fromkeys(("input_norm", "pre_mlp_norm"), "norm"),
        **{"query": "mixer.q_proj", "key": "mixer.k_proj", "value": "mixer.v_proj", "attention_output": "mixer.o_proj"},
        **{"up": "mixer.up_proj", "down": "mixer.down_proj"},
        **{role: name.replace("mlp.", "mixer.") for role, name in mixture.NAMES.items()},
        **WITHIN,
    },
    defaults={
        **{"vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 21504, "max_position_embeddings": 4096},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "mlp_hidden_act": "relu2"},
        **{"mlp_bias": False, "layer_norm_epsilon": 1e-5, "hybrid_override_pattern": "ME*-"},
        **{"mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4},
        **{"use_conv_bias": True, "use_bias": False, "chunk_size": 128, "time_step_min": 0.001},
        **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688, "n_group": 1},
        **{"moe_shared_expert_intermediate_size": 7688, "topk_group": 1, "norm_topk_prob": True},
        "routed_scaling_factor": 1.0,
    },
    aliases={
        "layer_types": "layers_block_type",
        **{"num_local_experts": "n_routed_experts", "mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel"},
        **{"mamba_conv_bias": "use_conv_bias", "mamba_chunk_size": "chunk_size", "mamba_dt_min": "time_step_min"},
    },
)
