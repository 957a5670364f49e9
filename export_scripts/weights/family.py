"""What a model family is to a conversion: FasterTransformer's layout and the ``config.ini`` that its loader reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from export_scripts.weights.schema import TargetTensor
from ft_format.config_ini import Sections, render


@dataclass(frozen=True)
class ConfigValues:
    """What a ``config.ini`` is rendered from.

    Attributes:
        dims: of the model.
        tensor_para_size: ranks that the shards are cut for.
        data_type: fp32, fp16 or bf16, on disk.
        start_id, end_id: of the vocabulary.
        extra: sections and keys that the source brings along; they are added to the family's own.
    """

    dims: Any
    tensor_para_size: int
    data_type: str
    start_id: int
    end_id: int
    extra: Sections = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """One model of FasterTransformer.

    Attributes:
        name: FasterTransformer's: gpt, gptj, gptneox, t5.
        schema: lists every tensor by name, without ``.<rank>.bin``, given the dimensions.
        config: renders ``config.ini`` in the order of FasterTransformer's own converter.
        divided: attributes of the dimensions that tensor_para_size must divide.
    """

    name: str
    schema: Callable[[Any], Mapping[str, TargetTensor]]
    config: Callable[[ConfigValues], Sections]
    divided: tuple[str, ...] = ("head_num", "inter_size")


def render_config(family: Family, values: ConfigValues) -> str:
    """Render ``config.ini``."""
    return render(family.config(values), values.extra)
