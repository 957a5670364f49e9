"""EAGLE-3 heads: a layer that drafts tokens from three hidden states of the model that it was trained for.

Its directory has one of two layouts: EAGLE's, which SGLang and SpecForge write too (the layer is ``midlayer``), and
that of the package speculators (``layers.0``); sources: SGLang's and vLLM's ``llama_eagle3.py``, speculators'
``models/eagle3``. The input for a token is the embedding of the one behind it beside ``fc`` of the model's hidden
states, each normalised; to draft further, the head's own output stands for ``fc``'s. It has a vocabulary of its own,
which ``d2t`` leads to the model's: token i is the model's i + d2t[i].
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from models import find
from models.blocks import predictor
from models.checks import Refusal, shown
from models.config_json import CHECKS
from models.decoder import Decoder
from models.described import NUMBER_TYPES
from models.directory import CONFIG_FILE, find_tensors, read_json
from models.errors import ModelError
from models.quantization import MODELOPT_FILE, quantization_said
from models.safetensors import StoredTensor
from models.tensor import Tensor

CLASSES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
"""What ``architectures`` names of EAGLE's layout; EAGLE's own directories name Llama and have a draft_vocab_size."""
LAYERS = ("llama", "qwen3")
"""Kinds of layers that speculators has."""
_KIND, _LAYER, _DRAFT = "speculators_model_type", "transformer_layer_config", "draft_vocab_size"
_TAPS = "eagle_aux_hidden_state_layer_ids"
_MAP, _EMBEDDING, _HEAD, _MOST_LISTED = "d2t", "embed_tokens.weight", "lm_head.weight", 20
_UNUSED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")  # d2t says the first; the others are for training
_NOT_SERVED = {
    "norm_before_fc": "the hidden states' norm before fc is not computed",
    "fc_norm": "the hidden states' norms before fc are not computed",
}
_NAMES = {
    **{"embedding": "embed_tokens", "final_norm": "norm", "head": "lm_head", "predictor.projection": "fc"},
    **{"predictor.embedding_norm": "input_layernorm", "predictor.hidden_norm": "hidden_norm"},
}
_STATES = 3


@dataclass(frozen=True)
class Eagle3(Decoder):
    """A head as a decoder of one layer, and what leads into it.

    Attributes:
        draft_size: tokens that it predicts.
        model_width: of the model's hidden states.
        taps: the model's layers before which its hidden states are taken, in order; its number of layers: behind the
            last. So transformers numbers ``hidden_states``.
        norms_residual: whether the normalised input is the residual stream, else the input itself.
        norms_output: whether what stands for fc's output is behind the final norm.
        has_embedding, has_head: whether they are its own; else they are the model's.
        targets: the model's token for each of its own; empty: they are the same.
    """

    draft_size: int = 0
    model_width: int = 0
    taps: tuple[int, ...] = ()
    norms_residual: bool = False
    norms_output: bool = False
    has_embedding: bool = True
    has_head: bool = True
    targets: tuple[int, ...] = ()

    def layer(self, index: int = 0) -> dict[str, Tensor]:
        """See Decoder; attention's input is twice as wide, and has a norm for each half."""
        found = {role: tensor for role, tensor in super().layer(index).items() if role != "input_norm.weight"}
        for role in ("query.weight", "key.weight", "value.weight"):
            found[role] = Tensor((found[role].axes[0], (2, "hidden_units")), found[role].split_axis)
        norms = (f"predictor.{half}_norm.weight" for half in ("embedding", "hidden"))
        into = {"predictor.projection.weight": Tensor(("hidden_units", (_STATES, "model_width")), 0)}
        return {**into, **{role: predictor.NORMS[role] for role in norms}, **found}

    def name_of(self, role: str, layer: int | str = "{layer}") -> str:
        """See Decoder; what leads into the head stands outside of the layer."""
        name, is_outer = super().name_of(role, layer), role.startswith("predictor.projection")
        return name.removeprefix(f"{self.names['layer']}.") if is_outer else name

    def tensors(self) -> dict[str, Tensor]:
        """See Decoder."""
        found = super().tensors()
        own = {_EMBEDDING: self.has_embedding, _HEAD: self.has_head}
        found[_HEAD] = Tensor(("draft_size", "hidden_units"), 0).sized(self.axis_size)
        return {name: tensor for name, tensor in found.items() if own.get(name, True)}


def read_eagle3(directory: Path, model: Decoder, ranks: int, error: Refusal) -> Eagle3:
    """Read the description of a head, and check that it and its tensors fit a model.

    Args:
        directory: of the head, with safetensors.
        model: that it drafts for.
        ranks: that share the model's head.
        error: makes the exception that names everything which does not fit.
    """
    said = read_json(directory / CONFIG_FILE, error)
    in_files = {name: stored for name, (_, stored) in find_tensors(directory, error).items()}
    try:
        head, problems = _described(said, model, in_files)
    except ModelError as problem:
        raise error(f"{directory} is no EAGLE-3 head: {problem.problem}", problem.hint) from None
    beside = read_json(directory / MODELOPT_FILE, error)
    if quantization_said(said, beside, str(directory / CONFIG_FILE), error):
        problems.append("quantization_config: a head is served as fp32, fp16 or bf16")
    if _HEAD not in in_files and ranks > 1:
        problems.append(f"{_HEAD}: missing, and {ranks} ranks share the model's")
    if head.num_layer == 1:
        problems += _tensor_problems(head, in_files)
    if not problems and _MAP in in_files:
        head = replace(head, targets=_targets(directory, error))
        if outside := [token for token in head.targets if not 0 <= token < model.vocab_size]:
            problems.append(f"{_MAP}: leads to token {outside[0]}  (the model has {model.vocab_size})")
    if problems:
        more = [f"... and {len(problems) - _MOST_LISTED} more"] if len(problems) > _MOST_LISTED else []
        lines = "\n  ".join(problems[:_MOST_LISTED] + more)
        raise error(f"{directory} is no EAGLE-3 head that fits the model\n  {lines}", "take the head of this model")
    return head


def _described(said: Mapping[str, Any], model: Decoder, in_files: Collection[str]) -> tuple[Eagle3, list[str]]:
    """Return what config.json describes, and how it does not fit the model.

    Raises:
        ModelError: it is none, or damaged.
    """
    layer, problems = _layer_of(said)
    read = find(layer.get("model_type")).read({**layer, "tie_word_embeddings": False})
    draft_size = CHECKS.bounded(said.get(_DRAFT) or read.vocab_size, f"{CONFIG_FILE}: {_DRAFT}", read.vocab_size)
    width_key = "hidden_size" if said.get("target_hidden_size") is None else "target_hidden_size"
    for key, value, legal, of in (
        (width_key, said.get("target_hidden_size") or read.hidden_units, model.hidden_units, "width"),
        ("vocab_size", read.vocab_size, model.vocab_size, "vocabulary"),
    ):
        if value != legal:
            problems.append(f"{key}: {shown(value)}  (the model's {of} is {legal})")
    if read.num_layer != 1:
        problems.append(f"num_hidden_layers: {read.num_layer}  (a head of one layer is served)")
    if _HEAD not in in_files and layer.get("tie_word_embeddings"):
        problems.append(f"tie_word_embeddings: True  (there is no {_HEAD}; it may be the model's, not the embedding)")
    is_as_wide = read.hidden_units == model.hidden_units
    place = "midlayer" if any(name.startswith("midlayer.") for name in in_files) else "layers.0"
    head = Eagle3(
        **{each.name: getattr(read, each.name) for each in fields(Decoder) if each.name != "names"},
        names={**read.names, **_NAMES, "layer": place},
        draft_size=draft_size,
        model_width=model.hidden_units,
        taps=_taps(said, model),
        norms_residual=bool(said.get("norm_before_residual")),
        norms_output=bool(said.get("norm_output")),
        has_embedding=_EMBEDDING in in_files or not is_as_wide,
        has_head=_HEAD in in_files or not is_as_wide or draft_size != model.vocab_size,
    )
    return head, problems


def _layer_of(said: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """Return what says the layer's sizes, as of a model, and what of the head is not served.

    Raises:
        ModelError: it is of another kind.
    """
    kind, layer = said.get(_KIND), said.get(_LAYER)
    named = CHECKS.entries(said.get("architectures") or [], f"{CONFIG_FILE}: architectures")
    is_eagles = named[:1] == ["LlamaForCausalLM"] and _DRAFT in said or named[:1] in [[each] for each in CLASSES]
    if kind == "eagle3" and isinstance(layer, Mapping) and layer.get("model_type") in LAYERS:
        found = layer
    elif kind is None and is_eagles and said.get("model_type", LAYERS[0]) == LAYERS[0]:
        found = {**said, "model_type": LAYERS[0]}
    else:
        other = {_KIND: kind, "architectures": named, "model_type": said.get("model_type")}
        told = ", ".join(f"{key} {shown(value)}" for key, value in other.items() if value)
        kinds = (
            f"architectures {' or '.join(CLASSES)} and llama, or {_KIND} eagle3 with a layer of {' or '.join(LAYERS)}"
        )
        raise ModelError(f"{CONFIG_FILE} describes {told or 'nothing'}", f"it has {kinds}")
    problems = [f"{key}: {shown(said[key])}  ({reason})" for key, reason in _NOT_SERVED.items() if said.get(key)]
    if _nested(said).get("use_aux_hidden_state", True) is not True:
        problems.append("eagle_config.use_aux_hidden_state: False  (a head works on three hidden states)")
    return found, problems


def _taps(said: Mapping[str, Any], model: Decoder) -> tuple[int, ...]:
    """Return where the model's hidden states are taken; see Eagle3.

    In ``eagle_config`` layers are named whose output is taken, as SGLang reads it; else those before which, as vLLM
    and speculators do.
    """
    count, (key, named) = model.num_layer, (_TAPS, said.get(_TAPS))
    if named is None and (named := _nested(said).get(_TAPS)) is not None:
        key = f"eagle_config.{_TAPS}"
    where, past = f"{CONFIG_FILE}: {key}", 1 if "." in key else 0
    usual = [2, count // 2, count - 3]
    found = usual if named is None else [past + CHECKS.whole(each, where) for each in CHECKS.entries(named, where)]
    if len(found) != _STATES or len({*found}) != _STATES or not all(0 <= each <= count for each in found):
        said_here = (
            f"{where} is {shown(named)}" if named is not None else f"{where} is not there, and stands for {usual}"
        )
        raise ModelError(said_here, f"a head takes {_STATES} different hidden states of the model's {count} layers")
    return tuple(sorted(found))


def _nested(said: Mapping[str, Any]) -> Mapping[str, Any]:
    found = said.get("eagle_config")
    return found if isinstance(found, Mapping) else {}


def _tensor_problems(head: Eagle3, in_files: Mapping[str, StoredTensor]) -> list[str]:
    problems, expected = list[str](), head.tensors()
    for name, tensor in expected.items():
        if name not in in_files:
            problems.append(f"{name}: missing")
        elif in_files[name].shape != tensor.shape:
            problems.append(f"{name}: {list(in_files[name].shape)}, expected {list(tensor.shape)}")
        elif in_files[name].data_type not in NUMBER_TYPES.values():
            problems.append(f"{name}: of type {in_files[name].data_type}; legal are {', '.join(NUMBER_TYPES.values())}")
    if _MAP in in_files:
        if (stored := in_files[_MAP]).shape != (head.draft_size,) or stored.data_type != "I64":
            kind = f"{stored.data_type} {list(stored.shape)}"
            problems.append(f"{_MAP}: {kind}, expected I64 [{head.draft_size}]")
    elif head.draft_size != head.vocab_size:
        problems.append(f"{_MAP}: missing, and the head has {head.draft_size} of {head.vocab_size} tokens")
    others = in_files.keys() - expected.keys() - {_MAP, *_UNUSED}
    return problems + [f"{name}: the head that {CONFIG_FILE} describes has none" for name in sorted(others)]


def _targets(directory: Path, error: Refusal) -> tuple[int, ...]:
    """Read which token of the model's each of the head's is."""
    file, stored = find_tensors(directory, error)[_MAP]
    with (directory / file).open("rb") as stream:
        stream.seek(stored.offset)
        steps = array("q", stream.read(stored.size_bytes))
    if sys.byteorder == "big":
        steps.byteswap()
    return tuple(token + step for token, step in enumerate(steps))
