"""What a model family is: its tensors, and the ``config.ini`` that FasterTransformer's loader reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ft_format.config_ini import ConfigIni, Sections, render
from ft_format.layout import ITEM_BYTES, LARGEST, MOST_LAYERS, Table, TensorSpec, whole_tensors
from ft_format.values import INDEX, Values, one_of, whole

SIZE, LAYERS = whole(1, LARGEST), whole(1, MOST_LAYERS)
"""Kinds of values: a dimension, and a number of layers."""
DATA_TYPE = one_of({name: name for name in ITEM_BYTES})
"""Kind of value: ``weight_data_type``."""
EXACT_GELU = "exact_gelu"
"""Key of ours that says which GELU training computed; without it, and in NVIDIA's library, it is the tanh form."""
P_TUNED, PREFIX = "3", "2"
"""Values of ``prompt_learning_type`` with which the shards hold a file for each task."""


@dataclass(frozen=True)
class ConfigValues:
    """What a ``config.ini`` is rendered from.

    Attributes:
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


class ReadDims(Protocol):
    """Reads a model's dimensions from its config.ini.

    Args:
        ini: of the model; what is missing or not legal is refused with its error.
        has: whether there are files of a tensor: some tensors' presence is said by nothing else.
        position_num: rows of a table of positions, where config.ini does not say them; None: it must.
    """

    def __call__(self, ini: ConfigIni, has: Callable[[str], bool], position_num: int | None = None) -> Any:
        """Return the family's Dims."""


@dataclass(frozen=True)
class Family:
    """One model of FasterTransformer.

    Attributes:
        name: FasterTransformer's: gpt, gptj, gptneox, t5.
        schema: lists every tensor by name, without ``.<rank>.bin``, given the dimensions.
        config: renders ``config.ini`` in the order of FasterTransformer's own converter.
        read: reads the dimensions that ``config`` has rendered.
        sections: of ``config.ini``, each with dimensions; the first that is there has the ids of start and end.
        model_types: values of ``model_type`` in config.pbtxt with which FasterTransformer serves it.
        divided: attributes of the dimensions that tensor_para_size must divide.
        head: the output projection's tensor.
        has_tied_head: whether FasterTransformer takes the embedding where the head has no file.
        id_keys: keys of the ids of start and end.
        width: attribute of the dimensions that is the width of the residual stream.
        prompt_types: values of ``prompt_learning_type`` with which FasterTransformer opens a file for each task.
        rotates_pairs: whether rotary positions rotate neighbours with each other, else the two halves of a head.
        kv_heads: attribute of the dimensions that is the number of heads of keys and values.
        uses_prefixes: whether it uses prefix prompts (PREFIX): its GPT opens their files and does not use them.
        is_encoder_decoder: whether an encoder reads the prompt, and a decoder writes what does not repeat it.
        defaults: of keys of ``config.ini`` that a model may leave out, where its dimensions have other names for them.
        own: lists the model's own tensors by name, given the dimensions, where they are not FasterTransformer's.
        beyond: lists what FasterTransformer computes otherwise of a model, given its dimensions, one line each. Such a
            model has no shards.
        head_sizes: for which FasterTransformer's own engine has kernels; empty: it says itself what it has.
    """

    name: str
    schema: Callable[[Any], Table]
    config: Callable[[ConfigValues], Sections]
    read: ReadDims
    sections: tuple[str, ...]
    model_types: tuple[str, ...]
    divided: tuple[str, ...] = ("head_num", "inter_size")
    head: str = "model.lm_head.weight"
    has_tied_head: bool = False
    id_keys: tuple[str, str] = ("start_id", "end_id")
    width: str = "hidden_units"
    prompt_types: tuple[str, ...] = (PREFIX, P_TUNED)
    rotates_pairs: bool = False
    kv_heads: str = "head_num"
    uses_prefixes: bool = False
    is_encoder_decoder: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    own: Callable[[Any], Table] | None = None
    beyond: Callable[[Any], tuple[str, ...]] = lambda dims: ()
    head_sizes: tuple[int, ...] = ()

    def tensors(self, dims: Any) -> Table:
        """List what stands between all sources and all targets: the model's own tensors, whole, by name."""
        return self.own(dims) if self.own else whole_tensors(self.schema(dims))

    def kernel_problem(self, dims: Any) -> str:
        """Return why FasterTransformer's own engine has no kernels for a model; empty: it has, or says so itself."""
        if not self.head_sizes or dims.size_per_head in self.head_sizes:
            return ""
        return f"size_per_head = {dims.size_per_head}  (its kernels have {', '.join(map(str, self.head_sizes))})"

    @property
    def main(self) -> str:
        """Name of the section with the data type, the prompt-learning tasks and the dimensions that all share."""
        return self.sections[-1]

    def section(self, ini: ConfigIni) -> Values:
        """Return the section with the ids; where the family has none, the refusal names its first one."""
        return ini.first(self.sections) or ini[self.sections[0]]


def render_config(family: Family, values: ConfigValues) -> str:
    """Render ``config.ini``."""
    return render(family.config(values), values.extra)


def read_tasks(ini: ConfigIni, family: Family) -> dict[str, int]:
    """Read the prompt-learning tasks: name to number of virtual tokens, in the order of their numbers."""
    tasks = [ini[f"task_{index}"] for index in range(ini[family.main].get("num_tasks", INDEX, 0))]
    return {task.get("task_name", str): task.get("prompt_length", INDEX, 0) for task in tasks}


def prompt_tensors(family: Family, ini: ConfigIni) -> dict[str, TensorSpec]:
    """List the files of the prompt-learning tasks that FasterTransformer opens; it opens none of a task of length 0."""
    kind = ini[family.main].get("prompt_learning_type", str, "0")
    lengths = {task: length for task, length in read_tasks(ini, family).items() if length > 0}
    if kind not in family.prompt_types:
        return {}
    if kind == P_TUNED:
        return {f"model.prompt_table.{task}.weight": TensorSpec((n, family.width)) for task, n in lengths.items()}
    shapes = {task: ("num_layer", 2, family.kv_heads, length, "size_per_head") for task, length in lengths.items()}
    return {f"model.prefix_prompt.{task}.weight": TensorSpec(shape, 2) for task, shape in shapes.items()}


def loaded_tensors(family: Family, ini: ConfigIni, has: Callable[[str], bool]) -> tuple[Any, Mapping[str, TensorSpec]]:
    """Read a model's dimensions, and list every tensor that FasterTransformer loads of it, prompts included.

    Args:
        family: of the model.
        ini: its config.ini.
        has: whether there are files of a tensor.
    """
    dims = family.read(ini, has)
    return dims, {**family.schema(dims), **prompt_tensors(family, ini)}
