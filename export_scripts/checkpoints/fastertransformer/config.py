"""What ``config.ini`` of an FT checkpoint says: the family, the dimensions, and which files there must be.

Its converters write dialects; what no loader reads is carried along and not interpreted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from export_scripts.checkpoints.files.archive import Archive
from ft_format.config_ini import FILE_NAME, ConfigIni, Sections
from ft_format.families import find_family
from ft_format.families.family import DATA_TYPE, EXACT_GELU, ConfigValues, Family, prompt_tensors
from ft_format.families.llama import KV_COPIES, kv_copies
from ft_format.families.t5 import GATED_ACTIVATIONS
from ft_format.layout import KV_HEADS, Dims, TensorSpec
from ft_format.values import FLAG, INDEX
from handover.errors import CheckpointError
from models.decoder import Decoder


class FtConfig:
    """A ``config.ini``, read.

    Attributes:
        sections: as they stand in the file.
        family: FasterTransformer's model.
        data_type: fp32, fp16 or bf16, of the files.

    Raises:
        CheckpointError: it is not an INI file, of no known family, or its data type is unknown.
    """

    def __init__(self, archive: Archive) -> None:
        self._ini = ConfigIni(archive.read_bytes(FILE_NAME), f"{archive.path}: {FILE_NAME}", CheckpointError)
        self.sections = {name: dict(section.texts) for name, section in self._ini.items()}
        self.family = self._family()
        self.data_type = self._ini[self.family.main].get("weight_data_type", DATA_TYPE, "fp32")

    def _family(self) -> Family:
        family = find_family(self._ini)
        if family is None or not all(section in self._ini for section in family.sections):
            raise CheckpointError(
                f"{FILE_NAME} has the sections {', '.join(self.sections) or '(none)'}",
                "FasterTransformer's are: gpt; gptj; gptneox; llama; encoder and decoder",
            )
        return family

    def dims(self, has: Callable[[str], bool], position_num: int) -> Dims:
        """Read the dimensions.

        Args:
            has: whether there are files of a name.
            position_num: rows of a GPT's position table, where the configuration does not say it.

        Raises:
            CheckpointError: a key is missing or no number, or encoder and decoder differ.
        """
        dims: Dims = self.family.read(self._ini, has, position_num)
        return dims

    def prompt_targets(self) -> dict[str, TensorSpec]:
        """Files of the prompt-learning tasks."""
        return prompt_tensors(self.family, self._ini)

    def ids(self) -> tuple[int, int]:
        """Start and end of a text."""
        start, end = (self.family.section(self._ini).get(key, INDEX) for key in self.family.id_keys)
        return start, end

    def exact_function(self) -> str:
        """Name the feed-forward's function in transformers' words where it is the exact GELU; else empty."""
        if not self._ini[self.family.main].get(EXACT_GELU, FLAG, False):
            return ""
        proj = self.sections.get("encoder", {}).get("feed_forward_proj", "")
        return "gated-gelu_python" if proj in GATED_ACTIVATIONS else "gelu"

    def resharded(self, values: ConfigValues) -> Sections:
        """Return every section as it stands, with the new number of ranks and data type."""
        changed: Mapping[str, object] = {
            "weight_data_type": values.data_type,
            "tensor_para_size": values.tensor_para_size,
        }
        mains = self.family.sections
        if isinstance(values.dims, Decoder):
            heads = values.dims.for_ranks(values.tensor_para_size).kv_head_num
            copies = heads // values.dims.kv_head_num
            if copies > 1 or KV_COPIES in self.sections[self.family.main]:
                changed = {**changed, KV_HEADS: heads, KV_COPIES: copies}
        sections = {name: {**keys, **(changed if name in mains else {})} for name, keys in self.sections.items()}
        if changed.get(KV_COPIES) == 1:
            del sections[self.family.main][KV_COPIES]
        return sections

    def without_copies(self, dims: Dims) -> tuple[Dims, int]:
        """Return the dimensions of the model, and for how many ranks heads of keys and values were copied; 1: not."""
        if not isinstance(dims, Decoder) or (copies := kv_copies(self._ini)) == 1:
            return dims, 1
        return dims.with_kv_heads(dims.kv_head_num // copies), dims.kv_head_num
