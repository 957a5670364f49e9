"""LAMBADA's metrics, and the spans of text that each of them scores.

"LAMBADA accuracy" means different things in different places, so each has a name here:

``last_token_accuracy``
    FasterTransformer backend, ``tools/gpt/evaluate_lambada.py``: the whole text is encoded, all tokens
    but the last are the context, and one greedy token must equal the last.
``last_word_accuracy_greedy``
    FasterTransformer, ``examples/pytorch/gpt/lambada_task_example.py``: the context is the stripped text
    before the last word (split at any white space), the target is a space and that word, encoded on its
    own; greedy generation must give every target token. (For the 7 texts of the full file whose last word
    follows other white space than a space, that script does not find the word and cuts one character
    instead; here the word itself is cut.)
``lambada_openai_accuracy``, ``lambada_openai_perplexity``
    lm-eval 1.0, task ``lambada_openai``: context and target are split at the last space and encoded
    jointly; the accuracy asks whether every target token is the most probable one after its
    predecessors, the perplexity is exp(-mean over documents of the target's summed log probability).
``nemo_harness_accuracy``, ``nemo_harness_perplexity``
    NeMo-Megatron-Launcher's ``eval_harness``, task ``lambada``: as ``lambada_openai``, after a line feed and with curly
    quotes made straight. NeMo's published 38.70% (126M) and 68.93% (5B) are this.
``1-gram_accuracy`` to ``4-gram_accuracy``
    FasterTransformer backend, the same script without ``--n-gram-disable``: after each token of each text k
    greedy tokens are generated, and all must equal the text's. They do exactly if each of the text's tokens is the
    most probable one given its predecessors, so one forward pass over a text is enough. The metric does not exist for
    an encoder-decoder, which would have to encode each beginning of a text by itself.

An encoder-decoder's encoder reads the context and its decoder the target, each encoded by itself, as lm-eval does it.

Every metric scores a span: whether each of its tokens is the most probable one given its predecessors (greedy decoding
then generates the span), and its log probability.
"""

from __future__ import annotations

from dataclasses import dataclass

from evaluation.client.tokenizer import Tokenizer
from handover.errors import ConfigError

Ids = tuple[int, ...]
_ASCII = str.maketrans("\u201c\u201d\u2018\u2019", "\"\"''")


@dataclass(frozen=True, order=True)
class Span:
    """The last tokens of a sequence, which the model should generate.

    Attributes:
        start: index of the span's first token, at least 1.
    """

    sequence: Ids
    start: int

    @property
    def target(self) -> Ids:
        """The tokens of the span."""
        return self.sequence[self.start :]


@dataclass(frozen=True)
class Sample:
    """One text, split and encoded in each of the four ways.

    Attributes:
        index: line in the file, from 0.
        target: the last word as ``lambada_openai`` sees it, without the space before it.
        last_word: span of the last word by FasterTransformer's rule.
        openai: span of the last word by lm-eval's rule.
        harness: span of the last word by NeMo-Megatron-Launcher's rule.
        cut_tokens: tokens that were cut on the left because the model has too few positions.
    """

    index: int
    target: str
    last_token: Span
    last_word: Span
    openai: Span
    harness: Span
    cut_tokens: int

    @property
    def spans(self) -> dict[Span, bool]:
        """All spans, and whether the log probability is requested; some of them may be equal."""
        return {self.last_token: False, self.last_word: False, self.openai: True, self.harness: True}


def split_openai(text: str) -> tuple[str, str]:
    """Split at the last space as lm-eval does; a context's trailing white space moves to the target."""
    context, _, word = text.rpartition(" ")
    stripped = context.rstrip()
    return stripped, f"{context[len(stripped) :]} {word}"


def split_last_word(text: str) -> tuple[str, str]:
    """Split off the last word, at any white space; the target is a space and the word."""
    word = text.split()[-1]
    return text.rstrip()[: -len(word)].strip(), f" {word}"


def split_harness(text: str) -> tuple[str, str]:
    """Split at the last space as NeMo-Megatron-Launcher's harness does."""
    context, _, word = text.translate(_ASCII).rpartition(" ")
    return f"\n{context.strip()}", f" {word}"


def prepare_sample(
    index: int, text: str, tokenizer: Tokenizer, max_positions: int | None, is_encoder_decoder: bool = False
) -> Sample:
    """Encode a text for every metric and cut contexts to the model's positions.

    One position is left free: a request generates at least one token, and an encoder's input has an end token.

    Raises:
        ConfigError: the text has no context or no last word.
    """
    context, word = split_openai(text)
    word_context, last_word = split_last_word(text) if text.strip() else ("", "")
    whole = tuple(tokenizer.encode(text))
    cases = {
        "last_token": (whole[:-1], whole[-1:]),
        "last_word": _encode(tokenizer, word_context, last_word, is_joint=False),
        "openai": _encode(tokenizer, context, word, is_joint=not is_encoder_decoder),
        "harness": _encode(tokenizer, *split_harness(text), is_joint=not is_encoder_decoder),
    }
    if not all(given and target for given, target in cases.values()):
        raise ConfigError(f"text {index + 1} has no context or no last word: {text[:60]!r}")
    kept = {
        name: _keep_last(given, max_positions, 1 if is_encoder_decoder else len(target) + 1)
        for name, (given, target) in cases.items()
    }
    return Sample(
        index=index,
        target=word.strip(),
        cut_tokens=max(len(given) - len(kept[name]) for name, (given, _) in cases.items()),
        **{name: Span(kept[name] + target, len(kept[name])) for name, (_, target) in cases.items()},
    )


def _encode(tokenizer: Tokenizer, context: str, target: str, is_joint: bool) -> tuple[Ids, Ids]:
    """Encode context and target: jointly, split after the context's tokens as lm-eval does it, or separately."""
    given = tuple(tokenizer.encode(context))
    return given, tuple(tokenizer.encode(context + target))[len(given) :] if is_joint else tuple(
        tokenizer.encode_part(target)
    )


def _keep_last(ids: Ids, max_positions: int | None, reserved: int) -> Ids:
    if max_positions is None or len(ids) + reserved <= max_positions:
        return ids
    return ids[-max(1, max_positions - reserved) :]
