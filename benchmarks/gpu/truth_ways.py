"""Ways of serving a made-up model in fp32, and which of them a family has: for benchmarks.gpu.truth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from backends.fastertransformer.engine.model.config import ModelConfig

from .truth_predictors import HEADED, PREDICTING

PLACES = 2  # of adapters on the device at once: others wait for one
ADAPTED = (
    *("llama", "qwen3", "gemma2", "phi3", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"),
    *("falcon_h1", "nemotron_h", "nemotron3_latent", "qwen3_next", "qwen3_5"),
    *("llama_eagle3", "deepseek_v3_mtp", "glm4_moe_mtp", "qwen3_5_mtp", "nemotron3_mtp"),
)
"""Families that have adapters: plain and fused matrices, norms, experts beside, latent attention and experts, states,
and what drafts for these."""
DRAFTING = DRAFTS, DRAFT_MODEL, MTP, EAGLE = "drafts", "draft_model", "mtp", "eagle3"
ADAPTERS, CHANGED, TIGHT, CONTINUED = "adapters", "adapters_changed", "tight", "continued"
_SPECULATION = {DRAFTS: "ngram", DRAFT_MODEL: "draft", MTP: MTP, EAGLE: EAGLE}


@dataclass(frozen=True)
class Way:
    """A way of serving.

    Attributes:
        drafts: what drafts, of DRAFTING; empty: nothing.
        adapts: whether requests name adapters.
        changes: whether adapters are loaded and unloaded while requests run.
        is_tight: whether there is so little cache that rows are set back.
        continues: whether latent attention has even short chunks behind short contexts in the plain form.
        given: further settings.
    """

    drafts: str = ""
    adapts: bool = False
    changes: bool = False
    is_tight: bool = False
    continues: bool = False
    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """What the engine is opened with."""
        own: dict[str, Any] = {"speculation": _SPECULATION[self.drafts]} if self.drafts else {}
        return {**self.given, **own, **({"max_adapters": PLACES} if self.adapts else {})}


def _named(drafts: str, adapts: bool, is_tight: bool) -> str:
    return "_".join([ADAPTERS] * adapts + [drafts] * bool(drafts) + [TIGHT] * is_tight)


WAYS = {
    "served": Way(),
    "whole": Way(given={"prefill_chunk_tokens": 0, "has_prefix_cache": False}),
    TIGHT: Way(is_tight=True),
    **{_named(*each): Way(each[0], each[1], False, each[2]) for each in product(DRAFTING, (False,), (False, True))},
    **{_named("", True, tight): Way("", True, False, tight) for tight in (False, True)},
    **{_named(drafts, True, True): Way(drafts, True, False, True) for drafts in DRAFTING},
    CHANGED: Way(adapts=True, changes=True),
    f"{CHANGED}_{DRAFTS}_{TIGHT}": Way(DRAFTS, True, True, True),
    CONTINUED: Way(continues=True, given={"prefill_chunk_tokens": 64}),
}
"""By name."""


def is_tried(name: str, config: ModelConfig, way: Way, is_on_cpu: bool) -> bool:
    """Return whether a family is served in a way.

    Drafts can be verified, but on a GPU where attention has a bias. A directory's model drafts for itself, unless its
    layers keep states; where it has one, its predictor or head does.
    """
    if way.adapts and name not in ADAPTED:
        return False
    if way.continues and (is_on_cpu or not (config.decoder and config.decoder.latent)):
        return False
    has_bias = config.encoder is not None or config.positions in ("alibi", "relative")
    if way.drafts and has_bias and not is_on_cpu:
        return False
    has_own = {
        "": True,
        DRAFTS: True,
        DRAFT_MODEL: config.decoder is not None and not config.keeps_states,
        MTP: name.endswith(PREDICTING),
        EAGLE: name.endswith(HEADED),
    }
    return has_own[way.drafts]
