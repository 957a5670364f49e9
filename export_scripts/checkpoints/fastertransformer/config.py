"""What ``config.ini`` of an FT checkpoint says: the family, the dimensions, and which files there must be.

Keys and defaults: FasterTransformer, ParallelGptTritonModel.cc, GptJTritonModel.cc, GptNeoXTritonModel.cc and
T5TritonModel.cc. Its converters write dialects; what no loader reads is carried along and not interpreted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.conversion.dtypes import STORAGE
from export_scripts.weights import gpt, gptj, gptneox, t5
from export_scripts.weights.family import ConfigValues, Family
from export_scripts.weights.schema import Dims, ModelDims, TargetTensor
from ft_format.config_ini import FILE_NAME, ConfigIni, Sections
from ft_format.values import COUNT, FLAG, INDEX, Values, fraction, one_of
from handover.errors import CheckpointError

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
        self._ini = ConfigIni(archive.read_bytes(FILE_NAME), f"{archive.path}: {FILE_NAME}", CheckpointError)
        self.sections = {name: dict(section.texts) for name, section in self._ini.items()}
        self.family = self._family()
        self.main = "encoder" if self.family is t5.FAMILY else self.family.name
        self.data_type = self._section().get("weight_data_type", one_of({name: name for name in STORAGE}), "fp32")

    def _family(self) -> Family:
        for family in (gpt.FAMILY, gptj.FAMILY, gptneox.FAMILY):
            if family.name in self.sections:
                return family
        if all(name in self.sections for name in _T5_SECTIONS):
            return t5.FAMILY
        raise CheckpointError(
            f"{FILE_NAME} has the sections {', '.join(self.sections) or '(none)'}",
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
        section = self._section()
        return ModelDims(
            head_num=section.get("head_num", COUNT),
            size_per_head=section.get("size_per_head", COUNT),
            inter_size=section.get("inter_size", COUNT),
            num_layer=section.get("num_layer", COUNT),
            max_pos_seq_len=section.get("max_pos_seq_len", INDEX, position_num),
            vocab_size=section.get("vocab_size", COUNT),
            layernorm_eps=section.get("layernorm_eps", fraction(), 1e-5 if self.family is gptneox.FAMILY else 1e-6),
            has_untied_head=has("model.lm_head.weight"),
            activation_type=section.get("activation_type", str, "Gelu"),
            layernorm_type=section.get("layernorm_type", str, "pre_layernorm"),
            has_positional_encoding=section.get("has_positional_encoding", FLAG, True),
            has_pre_decoder_layernorm=section.get("has_pre_decoder_layernorm", FLAG, False),
            has_post_decoder_layernorm=section.get("has_post_decoder_layernorm", FLAG, True),
            use_attention_linear_bias=section.get("use_attention_linear_bias", FLAG, False),
            rotary_embedding=section.get("rotary_embedding", INDEX, 0),
            use_gptj_residual=self.family is not gpt.FAMILY and section.get("use_gptj_residual", FLAG, True),
            model_variant=section.get("model_variant", str, ""),
        )

    def _t5_dims(self) -> t5.T5Dims:
        encoder, decoder = (self._ini[name] for name in _T5_SECTIONS)
        if differing := [key for key in _SHARED_BY_SIDES if encoder.texts.get(key) != decoder.texts.get(key)]:
            raise CheckpointError(f"{FILE_NAME}: encoder and decoder differ in {', '.join(differing)}")
        structure = self._section("structure")
        has_bias = structure.get("t5_with_bias", FLAG, False)
        return t5.T5Dims(
            head_num=encoder.get("num_heads", COUNT),
            size_per_head=encoder.get("d_kv", COUNT),
            d_model=encoder.get("d_model", COUNT),
            inter_size=encoder.get("d_ff", COUNT),
            encoder_layer_num=encoder.get("num_layers", COUNT),
            decoder_layer_num=decoder.get("num_layers", COUNT),
            vocab_size=encoder.get("vocab_size", COUNT),
            position_num=encoder.get("relative_attention_num_buckets_or_max_pos_seq_len", COUNT),
            has_relative_positions=structure.get("position_embedding_type", str, "relative") == "relative",
            has_bias=has_bias,
            activation=self._t5_activation(),
            has_scaled_logits=not has_bias and decoder.get("tie_word_embeddings", FLAG, True),  # T5Decoding.cc
            layernorm_eps=encoder.get("layer_norm_epsilon", fraction(), t5.LAYERNORM_EPS),
            ia3_num_tasks=structure.get("ia3_num_tasks", INDEX, 0),
            adapter_inter_size=encoder.get("adapter_inter_size", INDEX, 0),
        )

    def _t5_activation(self) -> str:
        """Name the activation; whether there is a gate is said apart from it."""
        name = self._section().get("feed_forward_proj", str, "gelu")
        if not self._section("structure").get("use_gated_activation", FLAG, False):
            return name.removeprefix("gated-")
        gated = (name, f"gated-{name}", "gated-gelu")
        return next(each for each in gated if each in t5.GATED_ACTIVATIONS)

    def prompt_targets(self) -> dict[str, TargetTensor]:
        """Tables of prompts by task (``prompt_learning_type`` 3: whole on every rank)."""
        width = "d_model" if self.family is t5.FAMILY else "hidden_units"
        tasks = [self._ini[f"task_{task}"] for task in range(self._section().get("num_tasks", INDEX, 0))]
        return {
            f"model.prompt_table.{task.get('task_name', str)}.weight": TargetTensor(
                (task.get("prompt_length", INDEX), width)
            )
            for task in tasks
        }

    def ids(self) -> tuple[int, int]:
        """Start and end of a text."""
        if self.family is t5.FAMILY:
            decoder = self._ini["decoder"]
            return decoder.get("decoder_start_token_id", INDEX), decoder.get("eos_token_id", INDEX)
        return self._section().get("start_id", INDEX), self._section().get("end_id", INDEX)

    def resharded(self, values: ConfigValues) -> Sections:
        """Give every section as it stands, with the new number of ranks and data type."""
        changed: Mapping[str, object] = {
            "weight_data_type": values.data_type,
            "tensor_para_size": values.tensor_para_size,
        }
        mains = _T5_SECTIONS if self.family is t5.FAMILY else (self.main,)
        return {name: {**keys, **(changed if name in mains else {})} for name, keys in self.sections.items()}

    def _section(self, name: str = "") -> Values:
        """Return a section, by default the family's own; one that may be missing is empty then."""
        name = name or self.main
        return self._ini[name] if name in self._ini else Values(f"{FILE_NAME}: [{name}]", {}, CheckpointError)
