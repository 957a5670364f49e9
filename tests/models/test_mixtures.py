"""Which experts a token has and how they are weighted: what a description says is what transformers' class computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tiny_models.drawn_models import config_of, drawn, saved_shapes
from support.tiny_models.huggingface_models import filling

import models
from models import ARCHITECTURES, Architecture
from models.blocks.mixture import SIGMOID, Mixture

DRAWS, COMPUTED, TOKENS = 200, 12, 7
MIXTURES = [each for each in ARCHITECTURES if any("mixture.expert_num" in keys.says for keys in each.keys)]
each = pytest.mark.parametrize("architecture", MIXTURES, ids=lambda each: each.model_type)


def chosen(mixture: Mixture, logits: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """How each token weights each expert, by the words of the description; 0: the expert is not chosen."""
    scores = logits.sigmoid() if mixture.scoring == SIGMOID else logits.softmax(-1)
    choice = scores if bias is None else scores + bias
    if mixture.group_num > 1:
        groups = choice.reshape(len(choice), mixture.group_num, -1)
        best = groups.topk(2 if mixture.is_group_of_two else 1, -1).values.sum(-1)
        outside = torch.ones_like(best, dtype=torch.bool).scatter(
            -1, best.topk(mixture.groups_per_token).indices, False
        )
        choice = groups.masked_fill(outside[..., None], -torch.inf).flatten(-2)
    places = choice.topk(mixture.experts_per_token, -1).indices
    weights = scores.gather(-1, places)
    if mixture.is_normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return torch.zeros_like(scores).scatter(-1, places, weights * mixture.scale)


def model_of(values: dict[str, Any], class_name: str) -> Any:
    """Transformers' model of a configuration; every number of it is filled."""
    import transformers

    config = config_of(values)
    config._attn_implementation = config._experts_implementation = "eager"
    model = getattr(transformers, class_name)(config).eval()
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if "inv_freq" not in name:
                value.copy_(torch.from_numpy(filling(name, tuple(value.shape))))
    return model


def routers(model: Any) -> list[tuple[Any, torch.Tensor | None]]:
    """Each layer's router, and its bias for choosing."""
    found = []
    for layer in model.model.layers:
        block = next(getattr(layer, name) for name in ("mlp", "feed_forward", "mixer") if hasattr(layer, name))
        if gate := getattr(block, "gate", None) or getattr(block, "router", None):
            holders = (block, gate, getattr(gate, "moe_statics", None))
            biases = (getattr(holder, "e_score_correction_bias", None) for holder in holders)
            found.append((gate, next((bias for bias in biases if bias is not None), None)))
    return found


def weighted(gate: Any, hidden: torch.Tensor, more: list[Any]) -> torch.Tensor:
    """How transformers' router weights each expert of each token; Llama 4's says it of all experts."""
    logits, weights, *places = gate(hidden, *more)
    if not places:
        return torch.as_tensor(logits)
    return torch.zeros_like(logits).scatter(-1, places[0], weights.to(logits.dtype))


def some_and_all(some: int, every: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "seeds", [range(some), pytest.param(range(some, every), marks=pytest.mark.long)], ids=("some", "the others")
    )


@each
@some_and_all(20, DRAWS)
def test_many_configurations_are_read_and_written_as_they_are_meant(architecture: Architecture, seeds: range) -> None:
    """Read of a file, of what transformers makes of the file, and of what is written, a model is the same."""
    for seed in seeds:
        values = drawn(architecture.model_type, seed)
        decoder = architecture.read(values)
        written = architecture.write(decoder)
        assert architecture.read(written) == decoder
        assert architecture.read(config_of(values).to_dict()) == decoder
        made = saved_shapes(config_of({**written, "model_type": architecture.model_type}), architecture.class_name)
        assert {name: tensor.shape for name, tensor in decoder.tensors().items()} == made, values


@each
@pytest.mark.parametrize("count", [COMPUTED, pytest.param(3 * COMPUTED, marks=pytest.mark.long)])
def test_experts_are_chosen_and_weighted_as_described(architecture: Architecture, count: int) -> None:
    seen = 0
    for seed in range(DRAWS):
        values = drawn(architecture.model_type, seed)
        mixture = architecture.read(values).mixture
        if mixture is None:
            continue
        if seen == count:
            break
        for gate, bias in routers(model_of(values, architecture.class_name))[:1]:
            hidden = torch.randn(TOKENS, values["hidden_size"], generator=torch.Generator().manual_seed(seed))
            with torch.no_grad():
                wanted = weighted(gate, hidden, [bias] if architecture.model_type == "minimax_m2" else [])
                made = chosen(
                    mixture,
                    torch.nn.functional.linear(hidden, gate.weight, getattr(gate, "bias", None)).float(),
                    None if bias is None else bias.squeeze(),
                )
            assert torch.allclose(made, wanted, atol=1e-6), values
            seen += 1
    assert seen == count


@each
@some_and_all(COMPUTED // 3, COMPUTED)
def test_what_is_written_computes_the_same_logits(architecture: Architecture, seeds: range) -> None:
    ids = torch.arange(1, 17)[None]
    for seed in seeds:
        values = drawn(architecture.model_type, seed)
        written = architecture.write(models.find(architecture.model_type).read(values))
        model = model_of(values, architecture.class_name)
        made = model_of(
            {**written, "model_type": architecture.model_type, "pad_token_id": None}, architecture.class_name
        )
        made.load_state_dict(model.state_dict())
        with torch.no_grad():
            assert torch.equal(*(each(ids, use_cache=False).logits for each in (made, model))), values
