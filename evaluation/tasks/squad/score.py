"""SQuAD's official figures, by the definitions of its two evaluation scripts.

An answer is compared after lower-casing it, dropping ASCII punctuation and the articles a, an and the, and collapsing
white space. *Exact match* means equality, *F1* is the harmonic mean of precision and recall over the words, counted
with their multiplicity; of several gold answers the best counts. The scripts of v1.1 and v2.0 differ for answers that
are empty after this normalisation: v1.1 gives an F1 of 0, v2.0 of 1 if both are empty; v2.0 ignores gold answers that
are empty, and the right answer to a question without one is the empty text.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from evaluation.tasks.metric import Metric, share
from evaluation.tasks.squad.data import V2

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class QuestionScore:
    """The scores of one question; a figure is None if the request failed or the figure does not apply.

    Attributes:
        index: index of the question in the file, from 0.
        has_answer: whether the passage has the answer (v2.0 also has questions without one).
        prompt_tokens: number of tokens of the prompt, with virtual tokens.
        cut_tokens: tokens that were cut from the passage because the model has too few positions.
        prediction: the model's answer.
        exact: 1 if the prediction is a gold answer, else 0.
        f1: F1 of the prediction's words, from 0 to 1.
        token_identity: whether the prediction's first tokens are those of the first gold answer.
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
    """Return the best F1 of the prediction's words against any gold answer, from 0 to 1."""
    return max(_f1(prediction, answer, version) for answer in _gold(answers, version))


def summarise(scores: Sequence[QuestionScore], version: str) -> list[Metric]:
    """Compute the figures under the official scripts' names; for v2.0 also by kind of question."""
    exact_name = "exact" if version == V2 else "exact_match"
    figures = [
        share(exact_name, (score.exact for score in scores), f"exact match (official script, v{version})"),
        share("f1", (score.f1 for score in scores), f"F1 over words (official script, v{version})"),
    ]
    for prefix, kind in (("HasAns", "with"), ("NoAns", "without")) if version == V2 else ():
        if of_kind := [score for score in scores if score.has_answer is (kind == "with")]:
            for name in ("exact", "f1"):
                values = (getattr(score, name) for score in of_kind)
                figures.append(share(f"{prefix}_{name}", values, f"{name} of questions {kind} an answer"))
    figures.append(
        share(
            "token_identity_accuracy",
            (score.token_identity for score in scores if score.has_answer),
            "the first tokens are those of the first gold answer (FasterTransformer's SQuAD script: Accuracy)",
        )
    )
    return figures


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
