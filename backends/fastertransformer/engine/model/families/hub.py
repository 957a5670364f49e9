"""Decoders as Hugging Face's directories have them: what ``config.json`` describes, by the package ``models``.

What a model is comes from its description alone; no name of an architecture is looked at.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

from ft_format.layout import StoredTensor
from models.decoder import Decoder
from models.described import read_directory
from models.directory import CONFIG_FILE, NOT_NAMED, SpecialIds
from models.eagle3 import Eagle3
from models.engine_limits import beyond_engine, longest_text
from models.fused import taken_apart
from models.predictors import first_predictor
from models.tensor import Tensor

from ...errors import ConfigJsonError
from ..config import NO_POSITION_LIMIT, Layout, ModelConfig
from ..sections import sections_of
from .decoder import read_stack, structure

_log = logging.getLogger(__name__)


def read(directory: Path, ranks: int) -> ModelConfig:
    """Read ``directory/config.json``, and the special ids that ``generation_config.json`` may name.

    Args:
        directory: of the model.
        ranks: that share a layer; where they are more than the heads of keys and values, each has a copy of a head.

    Raises:
        ConfigJsonError: the file describes no model that is known, or one that this engine does not compute.
    """
    decoder, ids, data_type = read_directory(directory, ConfigJsonError)
    if beyond := beyond_engine(decoder):
        listed = "\n  ".join(beyond)
        raise ConfigJsonError(f"{directory / CONFIG_FILE} describes a network that is not served\n  {listed}")
    if decoder.predictor_num:
        _log.info("%s: layers that predict further tokens are read for speculation = mtp alone", directory)
    return _config(decoder, ids, data_type, ranks)


def read_predictor(directory: Path) -> ModelConfig:
    """Read what ``directory/config.json`` says of a model's first predictor, a network of one layer."""
    decoder, ids, data_type = read_directory(directory, ConfigJsonError)
    return replace(_config(first_predictor(decoder), ids, data_type), is_part=True)


def config_of_head(head: Eagle3) -> ModelConfig:
    """Return what an EAGLE-3 head is as a network, which predicts its own tokens."""
    ids = SpecialIds(NOT_NAMED, NOT_NAMED).settled(head.vocab_size)
    return replace(_config(head, ids, "fp32"), vocab_size=head.draft_size, is_part=True)


def _config(decoder: Decoder, ids: SpecialIds, data_type: str, ranks: int = 1) -> ModelConfig:
    copied = replace(taken_apart(decoder.for_ranks(ranks)), predictor_num=0)
    layers = partial(read_stack, decoder.names["final_norm"], copied.layer_tensors)
    return ModelConfig(
        family="llama",
        tensors=_tensors(replace(copied, has_tied_head=False)),
        decoder=decoder,
        layout=Layout(f"{decoder.names['embedding']}.weight", layers),
        head=f"{decoder.names['head']}.weight",
        has_tied_head=decoder.has_tied_head,  # a head that is there even so may be another one, and counts
        start_id=ids.start_id,
        end_id=ids.end_id,
        max_pos_seq_len=longest_text(decoder) or NO_POSITION_LIMIT,
        prompt_learning_start_id=ids.end_id + 1,
        weight_data_type=data_type,
        **structure(copied),
    )


def _tensors(decoder: Decoder) -> dict[str, StoredTensor]:
    parts = sections_of(decoder)
    return {name: _stored(tensor, parts.get(name, ())) for name, tensor in decoder.tensors().items()}


def _stored(tensor: Tensor, parts: tuple[int, ...]) -> StoredTensor:
    split_axis = None if tensor.axes[0] == "vocab_size" else tensor.split_axis  # every rank embeds all tokens
    return StoredTensor(tensor.shape, split_axis, is_summed=False, parts=parts)
