"""Texts of streams, token by token. Oracles: the tokenizers' libraries on all tokens, and a search in whole texts."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as some
from support.measurements.tokenizer_directories import pipeline as tokenizer_pipeline
from support.shards.ft_checkpoint_maker import make_ft_checkpoint
from transformers import GPT2Tokenizer, GPT2TokenizerFast

from deployment.openai.answers.answering import Answer
from deployment.openai.answers.completions import CompletionForm
from deployment.openai.engine.generation import StopStrings
from deployment.openai.engine.scores import CompletionScores, Score, write_chat_scores
from deployment.openai.texts.preparing import Prompt
from deployment.openai.texts.texts import Detokenizer, load_texts
from export_scripts.repository.tokenizer_models.slipway_tokenizer import TextIds

TEXTS = ["the world", " the the\n\nworld's  end ", "Grüße, 世界! 👍 ende", "👍👍👍", "don't 12345"]
Decode = Callable[[Sequence[int]], str]
Case = tuple[Path, Decode, Callable[[str], list[int]]]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Case:
    directory = make_ft_checkpoint(tmp_path_factory.mktemp("gpt2") / "1-gpu")
    library = GPT2Tokenizer(str(directory / "vocab.json"), str(directory / "merges.txt"))
    return directory, lambda ids: str(library.decode(ids, clean_up_tokenization_spaces=False)), library.encode


@pytest.fixture(scope="module")
def pipeline(gpt2: Case, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """The same vocabulary as ``tokenizer.json``."""
    directory = tmp_path_factory.mktemp("pipeline")
    library = GPT2TokenizerFast(str(gpt2[0] / "vocab.json"), str(gpt2[0] / "merges.txt"))
    library.save_pretrained(directory)
    (directory / "vocab.json").unlink(missing_ok=True)
    return directory, lambda ids: str(library.decode(ids, clean_up_tokenization_spaces=False)), library.encode


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """SentencePiece that knows the letters of English only; every other character is made of byte pieces."""
    directory, model = tmp_path_factory.mktemp("pieces"), io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the world don't end 12345", "Gruß, e!"] * 20), model_writer=model, vocab_size=300,
        hard_vocab_limit=False, byte_fallback=True, minloglevel=2,
    )  # fmt: skip
    (directory / "tokenizer.model").write_bytes(model.getvalue())
    library = sentencepiece.SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))
    return directory, lambda ids: str(library.decode(list(ids))), lambda text: list(library.encode(text))


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """The same as ``tokenizer.json``, of which the library makes no text where a byte in a row of them is not."""
    directory, library = tmp_path_factory.mktemp("fallback"), tokenizer_pipeline("pieces")
    library.save(str(directory / "tokenizer.json"))
    return directory, library.decode, lambda text: list(library.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("kind", ["gpt2", "pipeline", "pieces", "fallback"])
def test_the_pieces_of_a_text_are_the_text(kind: str, request: pytest.FixtureRequest) -> None:
    directory, decode, encode = request.getfixturevalue(kind)
    texts = load_texts(directory, 0, 1, False)
    for text in TEXTS:
        ids = encode(text)
        for first in range(len(ids) + 1):
            detokenizer = Detokenizer(texts, ids[:first])
            found = [detokenizer.add(token) for token in ids[first:]]
            assert not any("\ufffd" in piece for piece in found)
            before = next(said for end in range(first, -1, -1) if "\ufffd" not in (said := decode(ids[:end])))
            assert before + "".join(found) == decode(ids), (text, first)


@pytest.mark.parametrize("kind", ["gpt2", "pipeline"])
def test_bytes_that_are_no_text_become_what_the_library_makes_of_them(kind: str, request: Any) -> None:
    directory, decode, _ = request.getfixturevalue(kind)
    texts, drawn = load_texts(directory, 0, 1, False), random.Random(5)
    for _ in range(100):
        ids = [drawn.randrange(1, 120) for _ in range(30)]
        detokenizer = Detokenizer(texts)
        found = "".join(map(detokenizer.add, ids))
        assert found.rstrip("\ufffd") == decode(ids).rstrip("\ufffd")


def ended_by(text: str, words: Sequence[str]) -> tuple[str, str | None]:
    """The text before the stop string that is complete first, found by looking at every beginning of the text."""
    for end in range(len(text) + 1):
        complete = [word for word in words if text[:end].endswith(word)]
        if complete:
            word = max(complete, key=len)
            return text[: end - len(word)], word
    return text, None


@given(
    some.text("ab\n", max_size=30),
    some.lists(some.text("ab\n", min_size=1, max_size=5), max_size=4),
    some.lists(some.integers(0, 30), max_size=10),
)
def test_a_stop_string_counts_wherever_tokens_end(text: str, words: list[str], cuts: list[int]) -> None:
    stops, shown, stop = StopStrings(words), "", None
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    for start, end in zip(places, places[1:], strict=False):
        added, stop = stops.add(text[start:end])
        shown += added
        expected, _ = ended_by(text, words)
        assert expected.startswith(shown)  # no part of a stop string is passed on
        if stop:
            break
    assert (shown + ("" if stop else stops.rest()), stop) == ended_by(text, words)


@pytest.mark.parametrize("kind", ["gpt2", "pipeline", "pieces"])
def test_the_bytes_of_scored_tokens_are_those_of_the_text(kind: str, request: pytest.FixtureRequest) -> None:
    """Also of tokens that are parts of a character, and of those that might have come in their place."""
    directory, decode, encode = request.getfixturevalue(kind)
    texts = load_texts(directory, 0, 1, False)
    for text in TEXTS:
        ids = encode(text)
        entries = write_chat_scores(texts, ids, [Score(-1.0, ((token, -1.0),)) for token in ids])["content"]
        assert bytes(byte for entry in entries for byte in entry["bytes"]).strip() == decode(ids).encode().strip()
        assert [entry["top_logprobs"][0]["bytes"] for entry in entries] == [entry["bytes"] for entry in entries]


@pytest.mark.parametrize("kind", ["gpt2", "pipeline", "pieces"])
@pytest.mark.parametrize("is_echoed", [False, True])
def test_the_offset_of_a_token_is_where_its_text_begins(
    kind: str, is_echoed: bool, request: pytest.FixtureRequest
) -> None:
    directory, decode, encode = request.getfixturevalue(kind)
    texts = load_texts(directory, 0, 1, False)
    prompt = tuple(encode("the"))
    for text in TEXTS:
        ids = encode(f"the {text}")[len(prompt) :]
        writer, shown = CompletionScores(texts, prompt, is_echoed), [*(prompt if is_echoed else ()), *ids]
        offsets = [offset for token in shown for offset in writer.write([token], [None])["text_offset"]]
        rest = [texts.decode([*prompt, *ids[:count]]) for count in range(len(ids))]
        begins = [len(each) - (0 if is_echoed else len(decode(prompt))) for each in rest]
        assert offsets[-len(ids) :] == begins
        assert offsets[0] == 0 and sorted(offsets) == offsets


@pytest.mark.parametrize("text", ["", "the world"])
@pytest.mark.parametrize("around", [TextIds(), TextIds((0,)), TextIds((), (0,)), TextIds((0,), (0,))])
def test_offsets_of_an_echo_are_those_of_its_text(text: str, around: TextIds, gpt2: Case) -> None:
    """Which has nothing of the token that stands for an empty prompt, nor of those around one."""
    texts = replace(load_texts(gpt2[0], 0, 1, False), ids=around)
    prompt, ids = Prompt(texts.encode(text), text, 9), gpt2[2](" end")
    form = CompletionForm(texts, (prompt,), 1, is_echoed=True, is_scored=True, has_ids=False)
    answer = Answer([" end"], list(ids), [Score(-1.0)] * len(ids), [Score(-1.0)] * (len(prompt.ids) - 1))
    ((written,), whole) = form.logprobs(0, answer), form.choice(0, answer)["text"]
    found = [
        whole[place:].startswith(name) for name, place in zip(written["tokens"], written["text_offset"], strict=True)
    ]
    assert all(found[len(around.before) :][: len(gpt2[2](text))]) and all(found[-len(ids) :])
    assert len(found) == len(prompt.ids) + len(ids)
