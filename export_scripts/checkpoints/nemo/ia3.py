"""Companions of a NeMo T5: IA3 vectors, one file a task.

NeMo, ``megatron_t5_adapter_model.py`` (``MegatronT5InfusedAdapterModel``), saves them apart from the model, as a
dictionary of dictionaries; where an attention's vectors hang, and what they are called, has changed over time.
FasterTransformer (nemo_t5_ia3.py) serves several tasks at once, numbered; here by the order of the files' names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.files.pickled import as_state
from export_scripts.checkpoints.files.rank_files import RankFiles
from export_scripts.checkpoints.files.torch_format import open_torch_file
from export_scripts.checkpoints.nemo import gpt as nemo
from export_scripts.checkpoints.nemo.companions import companions_of
from export_scripts.checkpoints.nemo.config_file import CONFIG_FILE
from export_scripts.checkpoints.source import Source
from export_scripts.tensors.dtypes import Array
from export_scripts.weights.schema import LazyTensor, Rule, Rules, Sources, T5Dims
from export_scripts.weights.values import Fields
from handover.errors import CheckpointError

KIND = "ia3"
"""Folder of these companions in a checkpoint's archive."""
# encoder:model.layers.0.self_attention:key_infused_adapter.scalers
# enc_dec_model.enc_dec_model.decoder.model.layers.0:inter_key_infused_adapter.scalers           (the first version)
# enc_dec_model.enc_dec_model.encoder.model.layers.0.mlp.adapter_layer.mlp_infused_adapter.scalers     (the last)
_KEY = re.compile(
    r"(?:enc_dec_model\.)*(?P<side>encoder|decoder)[:.]model\.layers\.(?P<layer>\d+)"
    r"(?:\.(?P<module>self_attention|inter_attention|mlp))?(?::|\.adapter_layer\.)"
    r"(?P<inter>inter_)?(?P<part>key|value|mlp)_infused_adapter\.scalers"
)
_ATTENTIONS = {"self_attention": "layer.0.SelfAttention", "inter_attention": "layer.1.EncDecAttention"}
_SIDES = {"encoder": ("self_attention",), "decoder": ("self_attention", "inter_attention")}


@dataclass(frozen=True)
class Ia3:
    """The vectors of all tasks.

    Attributes:
        names: of the tasks, in the order of their numbers.
        tensors: by key.
        other_keys: keys whose values are not tensors.
    """

    names: tuple[str, ...]
    tensors: Mapping[str, LazyTensor]
    other_keys: tuple[str, ...]

    def rules(self) -> dict[Sources, Rules]:
        """Make the table: a vector of each task becomes a row of FasterTransformer's tensor."""
        rules: dict[Sources, Rules] = {}
        if not self.names:
            return rules

        def add(source: str, target: str, layout: Any) -> None:
            keys = tuple(f"{_prefix(task)}{source}" for task in range(len(self.names)))
            rules[keys] = Rule(f"{target}.ia3.weight", layout, join_axis=0, concat_axis=0)

        for side, attentions in _SIDES.items():
            block = f"{side}.block.{{layer}}."
            for attention in attentions:
                for part in ("key", "value"):
                    target = f"{block}{_ATTENTIONS[attention]}.{part[0]}"
                    add(f"{side}.layers.{{layer}}.{attention}.{part}", target, _heads)
            add(f"{side}.layers.{{layer}}.mlp.mlp", f"{block}layer.{len(attentions)}.DenseReluDense", _row)
        return rules

    def config(self) -> dict[str, dict[str, object]]:
        """Return which number is which task; FasterTransformer reads their count alone."""
        return {"structure": {"ia3_task_names": ", ".join(self.names)}} if self.names else {}


def is_ia3_config(config: Mapping[str, Any]) -> bool:
    """Whether a ``model_config.yaml`` is that of a T5's IA3 vectors."""
    name = str(config.get("target") or "").rpartition(".")[2]
    scheme = Fields(config, CONFIG_FILE).fields("peft", {}).get("peft_scheme")
    return "T5" in name and ("InfusedAdapter" in name or scheme == "ia3")


def read_ia3(archive: Archive) -> Ia3:
    """Open the vectors of all tasks that lie beside a model.

    Raises:
        CheckpointError: a file is damaged or incomplete.
    """
    tensors: dict[str, LazyTensor] = {}
    other_keys: list[str] = []
    companions = companions_of(archive, KIND)
    for task, companion in enumerate(companions.values()):
        files = nemo.NemoCheckpoint(companion).weight_files()
        state = RankFiles(companion, files, _canonical, lambda within, name: open_torch_file(within, name, _flat))
        tensors |= {_prefix(task) + key: tensor for key, tensor in state.tensors(lambda _: 0).items()}
        other_keys += [_prefix(task) + key for key in state.other_keys()]
    return Ia3(tuple(name.removesuffix(".nemo") for name in companions), tensors, tuple(other_keys))


def refuse_unread(source: Source) -> None:
    """Make sure that IA3 vectors beside a model were added to it.

    Raises:
        CheckpointError: they lie beside a model of a kind for which they are not read.
    """
    if not getattr(source.dims, "ia3_num_tasks", 0) and companions_of(source.archive, KIND):
        raise CheckpointError(
            f"{source.archive.path} holds IA3 vectors beside a model of {source.source_map.name}",
            "they are read for NeMo's T5; move them away to convert the model without them",
        )


def with_ia3(dims: T5Dims, ia3: Ia3) -> T5Dims:
    """Return the dimensions of a model with these vectors."""
    return replace(dims, ia3_num_tasks=len(ia3.names))


def _prefix(task: int) -> str:
    return f"ia3_task_{task}."


def _canonical(key: str) -> str:
    """Bring a key of any version to one form: side.layers.N.module.part."""
    found = _KEY.fullmatch(key)
    if found is None:
        return key  # which no rule knows
    module = "mlp" if found["part"] == "mlp" else found["module"] or "self_attention"
    module = "inter_attention" if found["inter"] else module
    return f"{found['side']}.layers.{found['layer']}.{module}.{found['part']}"


def _flat(content: Any, where: str) -> Mapping[str, Any]:
    """Take a dictionary of dictionaries as one."""
    flat: dict[str, Any] = {}
    for key, value in as_state(content, where).items():
        if isinstance(value, dict):
            flat |= {f"{key}.{inner}": tensor for inner, tensor in value.items()}
        else:
            flat[key] = value
    return flat


def _heads(vector: Array, dims: T5Dims) -> Array:
    """Make a row of [heads * size_per_head]: [1, heads, size_per_head]."""
    return vector.reshape(1, -1, dims.size_per_head)


def _row(vector: Array, dims: T5Dims) -> Array:
    return vector[None]
