"""SQuAD's official figures, by the definitions of its two evaluation scripts.

An answer is compared after lower-casing it, dropping ASCII punctuation and the articles a, an and the, and collapsing
white space. *Exact match* asks for equality, *F1* is the harmonic mean of precision and recall over the words, counted
with their multiplicity; of several gold answers the best counts. The scripts of v1.1 and v2.0 differ where nothing is
left of an answer: v1.1 gives an F1 of 0, v2.0 of 1 if nothing is left of both; v2.0 passes over gold answers of which
nothing is left, and for a question without an answer the right one is the empty text.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from evaluation.tasks.metric import Metric, share
from evaluation.tasks.squad.data import V2

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Score:
    """What one question came to; a figure is None if its request failed or the figure is not for it.

    Attributes:
        index: of the question in the file, from 0.
        id: of the question.
        has_answer: the passage has the answer (v2.0 asks others too).
        prompt_tokens: virtual ones included.
        cut_tokens: dropped from the passage because the model has too few positions.
        prediction: what the model answered.
        exact: 1 if it is a gold answer, else 0.
        f1: of its words, from 0 to 1.
        token_identity: its first tokens are those of the first gold answer.
        error: why figures are missing; empty otherwise.
    """

    index: int
    id: str
    has_answer: bool
    prompt_tokens: int
    cut_tokens: int
    prediction: str = ""
    exact: float | None = None
    f1: float | None = None
    token_identity: bool | None = None
    error: str = ""


def normalise(text: str) -> str:
    """Lower-case, drop punctuation and articles, collapse white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answers: Sequence[str], version: str) -> float:
    """1 if the prediction is a gold answer, else 0; see the module for what nothing counts as."""
    return float(any(normalise(prediction) == normalise(answer) for answer in _gold(answers, version)))


def f1_score(prediction: str, answers: Sequence[str], version: str) -> float:
    """The best F1 of the prediction's words against a gold answer's, from 0 to 1."""
    return max(_f1(prediction, answer, version) for answer in _gold(answers, version))


def summarise(scores: Sequence[Score], version: str) -> list[Metric]:
    """Compute the figures under the names that the scripts give them; v2.0 also by kind of question."""
    exact_name = "exact" if version == V2 else "exact_match"
    figures = [
        share(exact_name, (score.exact for score in scores), f"exact match (official script, v{version})"),
        share("f1", (score.f1 for score in scores), f"F1 over words (official script, v{version})"),
    ]
    for prefix, has_answer in (("HasAns", True), ("NoAns", False)) if version == V2 else ():
        kind = "with" if has_answer else "without"
        figures += _of(
            [score for score in scores if score.has_answer is has_answer], prefix, f"of questions {kind} an answer"
        )
    figures.append(
        share(
            "token_identity_accuracy",
            (score.token_identity for score in scores if score.has_answer),
            "the first tokens are those of the first gold answer (FasterTransformer's SQuAD script: Accuracy)",
        )
    )
    return figures


def _of(scores: Sequence[Score], prefix: str, which: str) -> Iterable[Metric]:
    if not scores:
        return
    values: dict[str, Callable[[Score], float | None]] = {"exact": lambda s: s.exact, "f1": lambda s: s.f1}
    for name, value in values.items():
        yield share(f"{prefix}_{name}", map(value, scores), f"{name} {which}")


def _gold(answers: Sequence[str], version: str) -> Sequence[str]:
    if version != V2:
        return answers
    return [answer for answer in answers if normalise(answer)] or [""]


def _f1(prediction: str, answer: str, version: str) -> float:
    given, gold = normalise(prediction).split(), normalise(answer).split()
    if version == V2 and not (given and gold):
        return float(given == gold)
    common = sum((Counter(given) & Counter(gold)).values())
    if not common:
        return 0.0
    precision, recall = common / len(given), common / len(gold)
    return 2 * precision * recall / (precision + recall)
