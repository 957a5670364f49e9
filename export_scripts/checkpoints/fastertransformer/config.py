"""What ``config.ini`` of an FT checkpoint says: the family, the dimensions, and which files there must be.

Keys and defaults: FasterTransformer, ParallelGptTritonModel.cc, GptJTritonModel.cc, GptNeoXTritonModel.cc and
T5TritonModel.cc. Its converters write dialects; what no loader reads is carried along and not interpreted.
"""

from __future__ import annotations

import configparser
from collections.abc import Callable, Mapping
from typing import Any

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.conversion.dtypes import STORAGE
from export_scripts.weights import gpt, gptj, gptneox, t5
from export_scripts.weights.family import ConfigValues, Family, Sections
from export_scripts.weights.schema import Dims, ModelDims, TargetTensor
from export_scripts.weights.values import epsilon, quoted
from handover.errors import CheckpointError, nearest

CONFIG_FILE = "config.ini"
_T5_SECTIONS = ("encoder", "decoder")
_SHARED_BY_SIDES = ("num_heads", "d_kv", "d_model", "d_ff", "vocab_size", "weight_data_type", "adapter_inter_size")


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
        parser = configparser.ConfigParser(interpolation=None)
        try:
            parser.read_string(archive.read_bytes(CONFIG_FILE).decode())
        except (configparser.Error, UnicodeDecodeError) as error:
            raise CheckpointError(f"{archive.path}: {CONFIG_FILE} cannot be read: {error}") from error
        self.sections = {name: dict(parser[name]) for name in parser.sections()}
        self._parser = parser
        self.family = self._family()
        self.main = "encoder" if self.family is t5.FAMILY else self.family.name
        self.data_type = parser.get(self.main, "weight_data_type", fallback="fp32")
        if self.data_type not in STORAGE:
            raise CheckpointError(
                f"{CONFIG_FILE}: weight_data_type '{self.data_type}' is unknown", nearest(self.data_type, STORAGE)
            )

    def _family(self) -> Family:
        for family in (gpt.FAMILY, gptj.FAMILY, gptneox.FAMILY):
            if family.name in self.sections:
                return family
        if all(name in self.sections for name in _T5_SECTIONS):
            return t5.FAMILY
        raise CheckpointError(
            f"{CONFIG_FILE} has the sections {', '.join(self.sections) or '(none)'}",
            "FasterTransformer's are: gpt; gptj; gptneox; encoder and decoder",
        )

    def dims(self, has: Callable[[str], bool], position_num: int) -> Dims:
        """Read the dimensions.

        Args:
            has: whether there are files of a name.
            position_num: rows of a GPT's position table, where the configuration does not say it.

        Raises:
            CheckpointError: a key is missing or no number, or encoder and decoder differ.
        """
        return self._t5_dims() if self.family is t5.FAMILY else self._gpt_dims(has, position_num)

    def _gpt_dims(self, has: Callable[[str], bool], position_num: int) -> ModelDims:
        number = self._number
        return ModelDims(
            head_num=number("head_num"),
            size_per_head=number("size_per_head"),
            inter_size=number("inter_size"),
            num_layer=number("num_layer"),
            max_pos_seq_len=number("max_pos_seq_len", position_num),
            vocab_size=number("vocab_size"),
            layernorm_eps=self._epsilon("layernorm_eps", 1e-5 if self.family is gptneox.FAMILY else 1e-6),
            has_untied_head=has("model.lm_head.weight"),
            activation_type=self._word("activation_type", "Gelu"),
            layernorm_type=self._word("layernorm_type", "pre_layernorm"),
            has_positional_encoding=self._flag("has_positional_encoding", True),
            has_pre_decoder_layernorm=self._flag("has_pre_decoder_layernorm", False),
            has_post_decoder_layernorm=self._flag("has_post_decoder_layernorm", True),
            use_attention_linear_bias=self._flag("use_attention_linear_bias", False),
            rotary_embedding=number("rotary_embedding", 0),
            use_gptj_residual=bool(number("use_gptj_residual", 1)) if self.family is not gpt.FAMILY else False,
            model_variant=self._word("model_variant", ""),
        )

    def _t5_dims(self) -> t5.T5Dims:
        encoder, decoder = (self.sections[name] for name in _T5_SECTIONS)
        if differing := [key for key in _SHARED_BY_SIDES if encoder.get(key) != decoder.get(key)]:
            raise CheckpointError(f"{CONFIG_FILE}: encoder and decoder differ in {', '.join(differing)}")
        number, structure = self._number, "structure"
        has_bias = self._flag("t5_with_bias", False, structure)
        return t5.T5Dims(
            head_num=number("num_heads"),
            size_per_head=number("d_kv"),
            d_model=number("d_model"),
            inter_size=number("d_ff"),
            encoder_layer_num=number("num_layers"),
            decoder_layer_num=number("num_layers", section="decoder"),
            vocab_size=number("vocab_size"),
            position_num=number("relative_attention_num_buckets_or_max_pos_seq_len"),
            has_relative_positions=self._parser.get(structure, "position_embedding_type", fallback="relative")
            == "relative",
            has_bias=has_bias,
            activation=self._t5_activation(),
            has_scaled_logits=not has_bias and self._flag("tie_word_embeddings", True, "decoder"),  # T5Decoding.cc
            layernorm_eps=self._epsilon("layer_norm_epsilon", t5.LAYERNORM_EPS),
            ia3_num_tasks=number("ia3_num_tasks", 0, structure),
            adapter_inter_size=number("adapter_inter_size", 0),
        )

    def _t5_activation(self) -> str:
        """Name the activation; whether there is a gate is said apart from it."""
        name = self._word("feed_forward_proj", "gelu")
        if not self._flag("use_gated_activation", False, "structure"):
            return name.removeprefix("gated-")
        gated = (name, f"gated-{name}", "gated-gelu")
        return next(each for each in gated if each in t5.GATED_ACTIVATIONS)

    def prompt_targets(self) -> dict[str, TargetTensor]:
        """Tables of prompts by task (``prompt_learning_type`` 3: whole on every rank)."""
        width = "d_model" if self.family is t5.FAMILY else "hidden_units"
        count = self._number("num_tasks", 0)
        tasks = [f"task_{task}" for task in range(min(count, len(self.sections) + 1))]
        if missing := [section for section in tasks if "task_name" not in self.sections.get(section, {})]:
            raise CheckpointError(f"{CONFIG_FILE}: num_tasks is {count}, and {missing[0]} has no task_name")
        return {
            f"model.prompt_table.{self.sections[section]['task_name']}.weight": TargetTensor(
                (self._number("prompt_length", section=section), width)
            )
            for section in tasks
        }

    def ids(self) -> tuple[int, int]:
        """Start and end of a text."""
        if self.family is t5.FAMILY:
            return self._number("decoder_start_token_id", section="decoder"), self._number(
                "eos_token_id", section="decoder"
            )
        return self._number("start_id"), self._number("end_id")

    def resharded(self, values: ConfigValues) -> Sections:
        """Give every section as it stands, with the new number of ranks and data type."""
        changed: Mapping[str, object] = {
            "weight_data_type": values.data_type,
            "tensor_para_size": values.tensor_para_size,
        }
        mains = _T5_SECTIONS if self.family is t5.FAMILY else (self.main,)
        return {name: {**keys, **(changed if name in mains else {})} for name, keys in self.sections.items()}

    def _number(self, key: str, default: int | None = None, section: str = "") -> int:
        values: Mapping[str, Any] = self.sections.get(section or self.main, {})
        try:
            number = int(values.get(key, "" if default is None else default))
        except ValueError:
            number = -1
        if number < 0:
            raise CheckpointError(
                f"{CONFIG_FILE}: {key} of [{section or self.main}] is {quoted(values.get(key))}, not a number",
                "the checkpoint is not one of FasterTransformer's",
            )
        return number

    def _word(self, key: str, default: str) -> str:
        return self.sections[self.main].get(key, default)

    def _epsilon(self, key: str, default: float) -> float:
        return epsilon(self._word(key, str(default)), f"{CONFIG_FILE}: {key} of [{self.main}]")

    def _flag(self, key: str, default: bool, section: str = "") -> bool:
        try:
            return self._parser.getboolean(section or self.main, key, fallback=default)
        except ValueError as error:
            raise CheckpointError(f"{CONFIG_FILE}: {key} of [{section or self.main}]: {error}") from error
