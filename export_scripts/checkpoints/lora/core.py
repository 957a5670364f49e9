"""Adapters on megatron-core's linear layers in distributed arrays, as NeMo 2 and Megatron-Bridge keep them.

Keys, shapes and forward: NeMo 2.x, ``collections/llm/peft/utils.py``, and Megatron-Bridge, ``peft/utils.py``
(``ParallelLinearAdapter``: alpha / dim times linear_out of linear_in; ``GroupedExpertLinearAdapter``,
``SharedOuterGroupedExpertAdapter``: with an axis of experts before) and ``peft/canonical_lora.py`` (adapters of their
own for q, k, v, gate and up, but not of experts). The matrices lie whole. Rows of linear_out of ``linear_fc1`` may be
cut as a gated weight's: the first half of every training rank's rows, then the second half of each. Rows of linear_out
of Mamba's ``in_proj`` lie section by section, as the weight's do (``_split_tensor_factory``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from export_scripts.checkpoints.files.chunked import ChunkedState, ChunkedTensor, taken_apart
from export_scripts.checkpoints.lora.update import FC1, QKV, Update, pair_of, side_by_side, swapped
from export_scripts.checkpoints.tensor_values import read_whole
from export_scripts.tensors.dtypes import Array
from handover.errors import CheckpointError
from models.blocks.mamba import Mamba

_MARK, _EXPERTS, _FC1_LAYER = ".adapter.", ".mlp.experts.", "linear_fc1"
_KEY = re.compile(
    r"(?P<place>.+\.(?P<layer>linear_\w+|in_proj|out_proj|fc[12]_latent_proj))\.adapter(?:\.adapter_(?P<part>q|k|v|gate|up))?"
    rf"\.linear_(?P<side>in|out)\.weight(?:\.(?P<section>{'|'.join(Mamba.in_sections)}))?"
)
_IN_SECTIONS, _OF_HYBRIDS = "in_proj", ("in_proj", "out_proj", "fc1_latent_proj", "fc2_latent_proj")
_FUSED = {"linear_qkv": QKV, _FC1_LAYER: FC1}
# Training's own tensors, and what Transformer Engine leaves beside the weights.
_NO_WEIGHTS = re.compile(r"(?:optimizer|chained_|rng_state|rerun_state_machine_state).*|.*\._extra_state.*")

Pair = tuple[ChunkedTensor, ChunkedTensor]
"""linear_in [rank, columns] and linear_out [rows, rank]."""


@dataclass(frozen=True)
class Trained:
    """How an adapter's matrices are used.

    Attributes:
        rank, alpha: of every product, which is multiplied by alpha / rank.
        is_gated: the feed-forward's first layer has a gate.
        cuts_plain: rows of linear_fc1 are cut as a gated weight's although it has no gate.
        is_canonical: the tensors that lie fused in one weight have matrices of their own.
        sizes: of attention, where that is so.
        ranks: tensor-parallel ones, as the configuration says; 0: it does not.
        expert_num: experts of a layer; 0: adapters of experts are not read.
        expert_ranks: what the rank of an expert's product may be.
        has_hybrids: adapters of Mamba's layers, the gated delta rule's out_proj and latent experts are read.
    """

    rank: int
    alpha: float
    is_gated: bool
    cuts_plain: bool = False
    is_canonical: bool = False
    sizes: Mapping[str, int] = field(default_factory=dict)
    ranks: int = 0
    expert_num: int = 0
    expert_ranks: range = range(0)
    has_hybrids: bool = False


def weights_of(state: ChunkedState) -> list[str]:
    """List the keys that are a model's or an adapter's."""
    return [key for key in (*state.keys(), *state.other_keys()) if not _NO_WEIGHTS.fullmatch(key)]


def is_adapter(state: ChunkedState) -> bool:
    """Whether every weight belongs to an adapter."""
    keys = weights_of(state)
    return bool(keys) and all(_MARK in key for key in keys)


def updates_of(state: ChunkedState, trained: Trained, where: str) -> tuple[Update, ...]:
    """Describe what an adapter adds to each weight.

    Raises:
        CheckpointError: a key is no part of such an adapter, or a matrix is missing or of another shape.
    """
    tensors = state.tensors(lambda key: None)
    pairs: dict[str, dict[str, dict[str, str]]] = {}
    for key in weights_of(state):
        found, is_expert = _KEY.fullmatch(key), _EXPERTS in key
        if found is None or not _is_read(found, trained) or (is_expert and not trained.expert_num):
            mixers = ", Mamba's in_proj, out_proj, fc*_latent_proj" if trained.has_hybrids else ""
            others = "of a router" if trained.expert_num else "of a router or of experts"
            raise CheckpointError(
                f"{where}: {key} is no part of a LoRA adapter that is read",
                f"adapters of linear layers (linear_qkv, linear_proj, linear_fc1, linear_fc2{mixers}) are, not those "
                f"{others}{'' if trained.has_hybrids else ' or of a mixer'}",
            )
        if bool(found["part"]) != (trained.is_canonical and found["layer"] in _FUSED and not is_expert):
            raise CheckpointError(f"{where}: {key} is no part of the kind of adapter that the configuration names")
        side = f"out.{found['section']}" if found["section"] else found["side"]
        pairs.setdefault(found["place"], {}).setdefault(found["part"] or "", {})[side] = key
    updates: list[Update] = []
    for place, keys in pairs.items():
        if _EXPERTS in place:
            updates += _of_experts(place, keys[""], tensors, trained)
        elif place.endswith(_IN_SECTIONS):
            updates += _of_sections(place, keys[""], tensors, trained)
        else:
            updates.append(_update(place, keys, tensors, trained))
    return tuple(updates)


def _is_read(found: re.Match[str], trained: Trained) -> bool:
    """Whether a key is of a layer whose adapters are read, and lies there as that layer's do."""
    is_section = found["layer"] == _IN_SECTIONS and found["side"] == "out"
    return bool(found["section"]) == is_section and (trained.has_hybrids or found["layer"] not in _OF_HYBRIDS)


def _of_sections(
    place: str, keys: Mapping[str, str], tensors: Mapping[str, ChunkedTensor], trained: Trained
) -> Iterator[Update]:
    """Describe what is added to each section of a weight; all sections share linear_in."""
    for section in Mamba.in_sections:
        own = {side.partition(".")[0]: key for side, key in keys.items() if side in ("in", f"out.{section}")}
        update = _update(place, {"": own}, tensors, trained)
        yield replace(update, names=tuple(f"{name}.{section}" for name in update.names))


def _of_experts(
    place: str, keys: Mapping[str, str], tensors: Mapping[str, ChunkedTensor], trained: Trained
) -> Iterator[Update]:
    """Describe what is added to each expert; a matrix that has no axis of experts is that of all of them.

    Raises:
        CheckpointError: a matrix has the axis of another number of experts, or another rank than it can have.
    """
    each: dict[str, Sequence[ChunkedTensor]] = {}
    for key in keys.values():
        whole = tensors[key]
        each[key] = taken_apart(whole) if len(whole.shape) > 2 else (whole,) * trained.expert_num
        if len(each[key]) != trained.expert_num:
            raise CheckpointError(f"{key}  {list(whole.shape)}  is not of {trained.expert_num} experts")
    rank = tensors[keys["in"]].shape[-2] if "in" in keys and len(tensors[keys["in"]].shape) > 1 else trained.rank
    if rank not in trained.expert_ranks:
        wanted = " to ".join(map(str, sorted({trained.expert_ranks[0], trained.expert_ranks[-1]})))
        raise CheckpointError(f"{keys['in']}  is of rank {rank}, and the configuration says {wanted}")
    before, _, layer = place.rpartition(".")
    before = before.removesuffix(".experts").removesuffix(".experts")
    for expert in range(trained.expert_num):
        own = {key: those[expert] for key, those in each.items()}
        update = _update(f"{before}.experts.experts.{expert}.{layer}", {"": keys}, own, replace(trained, rank=rank))
        local = tuple(name.replace(".experts.experts.", ".experts.local_experts.") for name in update.names)
        yield replace(update, names=(*update.names, *local))


def _update(
    place: str, keys: Mapping[str, Mapping[str, str]], tensors: Mapping[str, ChunkedTensor], trained: Trained
) -> Update:
    layer, all_keys = place.rpartition(".")[2], [key for sides in keys.values() for key in sides.values()]
    words = [word for word, _ in _FUSED[layer].slots if word in keys] if "" not in keys else [""]
    pairs = {}
    for word in words:
        adapter = f"{place}.adapter.adapter_{word}" if word else f"{place}.adapter"
        pairs[word] = pair_of(adapter, keys[word], tensors, f"dim {trained.rank}", trained.rank, all_keys)
    rows = next(iter(pairs.values()))[1].shape[0] if words == [""] else _rows(place, pairs, trained)
    return Update(
        names=(f"{place}.weight", f"model.{place.removeprefix('module.')}.weight"),
        shape=(rows, next(iter(pairs.values()))[0].shape[1]),
        factors=tuple(tensor for pair in pairs.values() for tensor in pair),
        read=partial(_read, place, pairs, rows, trained),
        scale=trained.alpha / trained.rank,
        is_gated=layer == _FC1_LAYER and trained.is_gated,
        keys=tuple(all_keys),
        apart=() if words == [""] else tuple(n for n, (word, _) in enumerate(_FUSED[layer].slots) if word in keys),
    )


def _rows(place: str, pairs: Mapping[str, Pair], trained: Trained) -> int:
    """Count the rows of a weight whose tensors have matrices of their own, not necessarily all of them.

    Raises:
        CheckpointError: a matrix has not as many rows as the configuration says.
    """
    if place.endswith(_FC1_LAYER):
        wanted = dict.fromkeys(("gate", "up"), next(iter(pairs.values()))[1].shape[0])
    else:
        shared_by, size, groups = (trained.sizes[each] for each in ("heads_per_group", "size_per_head", "groups"))
        wanted = {"q": groups * shared_by * size, "k": groups * size, "v": groups * size}
    wrong = [
        f"{pairs[word][1].key}  {list(pairs[word][1].shape)}"
        for word in pairs
        if pairs[word][1].shape[0] != wanted[word]
    ]
    if wrong:
        raise CheckpointError(f"{', '.join(wrong)}  has not the rows that the configuration says: {wanted}")
    return sum(wanted.values())


def _read(place: str, pairs: Mapping[str, Pair], rows: int, trained: Trained) -> tuple[Array, Array]:
    """Read the matrices, rows of ``left`` in the order of the weight's."""
    is_fc1 = place.endswith(_FC1_LAYER)
    if "" in pairs:
        down, up = pairs[""]
        is_cut = is_fc1 and trained.cuts_plain and not trained.is_gated
        return _in_order(up, trained.ranks) if is_cut else read_whole(up), read_whole(down)
    is_cut = is_fc1 and trained.is_gated  # each of the two is one matrix, and cut as if it were both
    values = {
        word: (read_whole(down), _in_order(up, trained.ranks) if is_cut else read_whole(up))
        for word, (down, up) in pairs.items()
    }
    return side_by_side(values, _FUSED[place.rpartition(".")[2]], rows, trained.sizes)


def _in_order(up: ChunkedTensor, said: int) -> Array:
    """Read rows that are stored as the first half of every training rank's, then the second half of each.

    Raises:
        CheckpointError: their chunks are those of another number of ranks.
    """
    ranks, rest = divmod(len({chunk.offsets[0] for chunk in up.chunks}), 2)
    if rest or not ranks or (said and said != ranks):
        raise CheckpointError(
            f"{up.key} lies in {2 * ranks + rest} parts, which do not say in which order its rows are",
            f"a training of {said or 'T'} tensor-parallel ranks stores two parts of each",
        )
    return swapped(read_whole(up), 2, ranks) if ranks > 1 else read_whole(up)
