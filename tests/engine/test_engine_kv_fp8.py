"""A cache of FP8: the engine against transformers' model whose cache is rounded in the same way, by other code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engines.asking import CPU, ask, generated
from support.engines.hub_served import opened
from support.tiny_models.greedy import NEVER
from support.tiny_models.llama_models import save
from torch import Tensor
from transformers import DynamicCache

from backends.fastertransformer.engine.cache.fp8_entries import restore_entries, shape_of, unpack
from backends.fastertransformer.engine.cache.kv_cache import KvCache
from backends.fastertransformer.engine.cache.sizing import CacheShape, Entry
from backends.fastertransformer.engine.errors import EngineError

TOLD = {"end_id": NEVER, "runtime_top_p": 1e-7, "is_return_log_probs": True}
NEW = 8


def rounded(x: Tensor) -> Tensor:
    """Round by the least power of two that brings a head's largest number to 448 at most."""
    power = torch.exp2(torch.ceil(torch.log2(x.double().abs().amax(-1, keepdim=True) / 448)))
    return ((x.double() / power).to(torch.float8_e4m3fn).double() * power).to(x.dtype)


class RoundedCache(DynamicCache):
    """What comes in one pass sees itself as it is, but for a single token; all that comes later sees it rounded."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """See DynamicCache."""
        count, is_first = key_states.shape[2], self.get_seq_length(layer_idx) == 0
        kept = super().update(rounded(key_states), rounded(value_states), layer_idx, *args, **kwargs)
        if count == 1 and not is_first:
            return kept
        new = key_states, value_states
        return tuple(torch.cat((all_of[:, :, :-count], own), 2) for all_of, own in zip(kept, new, strict=True))


@torch.no_grad()
def expected_logits(model: Any, ids: list[int], first: int, known: int = 0) -> Tensor:
    """Run the first tokens, of which some are known from before, and then each by itself -> [T, V]."""
    cache, ends = RoundedCache(config=model.config), [*([known] if known else []), *range(first, len(ids) + 1)]
    begins = [0, *ends[:-1]]
    passes = [torch.tensor([ids[begin:end]]) for begin, end in zip(begins, ends, strict=True)]
    return torch.cat([model(each, past_key_values=cache, use_cache=True).logits[0] for each in passes])


def check_answers(engine: Any, model: Any, prompts: list[list[int]], known: int = 0) -> None:
    (outputs,) = engine.generate([engine.parse(ask(prompts, NEW, **TOLD))])
    for row, prompt in enumerate(prompts):
        found = generated(outputs, row)
        whole = [*prompt, *found]
        logits = expected_logits(model, whole, len(prompt), known)[:-1]
        assert found == logits[len(prompt) - 1 :].argmax(-1).tolist()
        scores = logits.log_softmax(-1).gather(1, torch.tensor(whole[1:])[:, None])[:, 0].numpy()
        assert np.abs(outputs["output_log_probs"][row, 0] - scores[len(prompt) - 1 :]).max() < 1e-4


def drawn(vocab: int, *lengths: int) -> list[list[int]]:
    return [np.random.default_rng(seed).integers(3, vocab, length).tolist() for seed, length in enumerate(lengths)]


# Ranks cut the heads of every model alike.
@pytest.mark.in_ci(when=lambda at: at.ranks == 1 or at.name == "llama")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_answers_are_those_of_a_rounded_cache(name: str, ranks: int, tmp_path: Path) -> None:
    """Rows of different lengths together; with head norms, and with windows and soft caps."""
    model = save(name, tmp_path).eval()
    prompts = drawn(model.config.vocab_size, 20, 1, 37)
    engine = opened(tmp_path, ranks, has_fp8_cache=True)
    check_answers(engine, model, prompts)
    engine.close()
    exact = opened(tmp_path)
    (outputs,) = exact.generate([exact.parse(ask(prompts[:1], NEW, **TOLD))])
    found = generated(outputs, 0)
    plain = model(torch.tensor([[*prompts[0], *found]])).logits[0, :-1].log_softmax(-1)
    logits = expected_logits(model, [*prompts[0], *found], 20)[:-1].log_softmax(-1)
    assert (logits - plain).abs().max() > 1e-3  # else nothing was rounded
    exact.close()


def test_a_known_beginning_and_chunks_are_read_rounded(tmp_path: Path) -> None:
    model = save("llama31", tmp_path).eval()
    (prompt,) = drawn(model.config.vocab_size, 70)
    engine = opened(tmp_path, has_fp8_cache=True)
    check_answers(engine, model, [prompt])
    check_answers(engine, model, [prompt], known=64)  # whole pages
    assert engine.metrics.prefix_hits == 64
    engine.close()


def test_rows_that_are_set_back_get_the_same_tokens(tmp_path: Path) -> None:
    """Pages that are given back and made again; twice as many tokens as fp16 would have, but for the scales."""
    model = save("llama31", tmp_path).eval()
    prompts = drawn(model.config.vocab_size, *[30] * 12)
    shape = CacheShape((Entry(2, 128), Entry(0, 0)), torch.float16)
    assert shape.token_bytes / shape_of(shape).token_bytes == pytest.approx(2 * 128 / 129)
    engine = opened(tmp_path, has_fp8_cache=True)
    token_bytes = engine._steps.cache.shape.token_bytes
    together = engine.generate([engine.parse(ask([prompt], 60, **TOLD)) for prompt in prompts])
    engine.close()
    tight = opened(tmp_path, has_fp8_cache=True, kv_cache_bytes=token_bytes * 32 * 14)
    again = tight.generate([tight.parse(ask([prompt], 60, **TOLD)) for prompt in prompts])
    assert tight.metrics.preemptions > 0
    for one, other in zip(together, again, strict=True):
        same = [a == b for a, b in zip(generated(one, 0), generated(other, 0), strict=True)]
        assert sum(same[:10]) == 10  # a row that begins again sees its own tokens as they are, once
    tight.close()


@pytest.mark.parametrize("is_head_major", [False, True])
def test_keys_and_values_that_a_task_begins_with_are_rounded_too(is_head_major: bool) -> None:
    shape = CacheShape((Entry(2, 16), Entry(3, 16)), torch.float32, is_head_major=is_head_major)
    cache = KvCache(shape_of(shape), CPU, 1 << 20, 64)
    row, content = cache.allocator.take(50), [torch.randn(2, heads, 40, 16) for heads in (2, 3)]
    cache.restore(np.array(row.pages), content)
    for kv, given in zip(cache.kv, content, strict=True):
        pages = kv[:, row.pages]
        entries = unpack(restore_entries(pages) if is_head_major else pages, torch.float32)
        found = entries.transpose(1, 2).flatten(2, 3)
        assert torch.equal(found[:, :, :40], rounded(given)) and not found[:, :, 40:].any()


def test_latent_vectors_are_refused_by_name(tmp_path: Path) -> None:
    save("deepseek_v3", tmp_path)
    with pytest.raises(EngineError, match="kv_cache_dtype = fp8 with .*, whose attention keeps latent vectors"):
        opened(tmp_path, has_fp8_cache=True)
