"""EAGLE-3 heads as speculators saves them: drafts are what its own modules say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from support.engines.asking import ask
from support.engines.every_draft import draft_always, noted_drafts
from support.engines.few_pages import Served
from support.engines.paged_steps import paged_steps
from support.tiny_models.eagle_heads import DRAFT_VOCAB, LAYERS, SIZES, TAPS, Head
from support.tiny_models.greedy import NEVER, argmaxes
from support.tiny_models.llama_models import VOCAB, save

from backends.fastertransformer.engine.settings import Settings


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("Llama", {}),
        ("Llama", {"norm_before_residual": True, "norm_output": True}),
        ("Qwen3", {"norm_before_residual": True}),
    ],
)
def test_drafts_are_those_of_its_modules(
    kind: str, said: dict[str, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save("llama", tmp_path, **LAYERS)
    head = saved(model, kind, tmp_path / "draft", **said)
    draft_always(monkeypatch)
    drafts = noted_drafts(monkeypatch)
    settings = Settings(tmp_path, 1, 1, "fp32", 1, "Llama", kv_cache_bytes=1 << 22, speculation="eagle3")
    served = Served(paged_steps(settings), drafts=(4, True))
    for line in ([5], list(range(3, 43))):
        tokens = served.say(ask([line], 20, end_id=NEVER))
        assert tokens == argmaxes(model, line, tokens)
    assert len(drafts) > 20
    for text, draft in drafts:
        assert draft == head.drafts(text, len(draft)), text


def saved(model: Any, kind: str, folder: Path, **said: bool) -> Head:
    """Save a random head as the package does."""
    layer = getattr(transformers, f"{kind}Config")(**SIZES)
    layer._attn_implementation = "eager"
    verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    proposal = GreedyTokenProposalConfig(speculative_tokens=3)
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=DRAFT_VOCAB,
        eagle_aux_hidden_state_layer_ids=list(TAPS),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3", proposal_methods=[proposal], default_proposal_method="greedy", verifier=verifier
        ),
        **said,
    )
    head = Eagle3DraftModel(config).eval()
    torch.manual_seed(7)
    targets = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
    with torch.no_grad():
        for each in head.parameters():
            is_norm = each.dim() == 1
            torch.nn.init.normal_(each, float(is_norm), 0.3 if is_norm else each.shape[-1] ** -0.5)
    known = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, targets, True)
    head.load_vocab_mappings(known, targets - torch.arange(DRAFT_VOCAB))
    head.save_pretrained(folder)
    parts = head.layers[0], head.embed_tokens, head.fc, head.norm, head.lm_head, head.rotary_emb
    return Head(model, *parts, targets, norms_output=said.get("norm_output", False))
