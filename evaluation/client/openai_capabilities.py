"""What an OpenAI API can do, found out by asking: OpenAI's protocol leaves much open, and servers differ.

Each question is one short request. A refusal means that the server cannot do it, and so does an answer that lacks
what was asked for. A server that is gone, or refuses the key, is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from evaluation.client.errors import RequestError
from evaluation.client.interface import Interface
from evaluation.client.openai_client import CHAT, Choice, Completed, ModelCard, OpenAIClient
from handover.errors import ConfigError, shortened

TOKEN_PREFIX = "token_id:"
"""With ``return_tokens_as_token_ids`` the name of a token is this and its number."""
GREEDY: Mapping[str, Any] = {"temperature": 0}
PROBE_IDS, PROBE_TEXT = (11, 12, 13), "One two three"
"""What a server is asked to go on with."""
_MOST_PROMPTS = 256


@dataclass(frozen=True, kw_only=True)
class Capabilities(Interface):
    """What an endpoint can do.

    Attributes:
        scores_prompts: ``echo`` with ``logprobs`` gives the log probability of each token of a prompt.
        scores_alone: ``max_tokens`` may be 0 with ``echo``, so that scoring generates nothing.
        names_ids: log probabilities name tokens by id, with ``return_tokens_as_token_ids``; else by text.
        returns_ids: ``return_token_ids`` returns generated ids.
        ignores_end: ``ignore_eos`` is accepted: an end token does not end an answer.
        counts_tokens: ``usage`` counts the tokens of prompts and answers.
        card: the model, as the server lists it.
        version: of the server; empty if unknown.
        refusals: what the endpoint cannot do, with its own words.
        is_chat_only: the endpoint completes no prompts and answers conversations.
    """

    max_batch_size: int = _MOST_PROMPTS
    is_decoupled: bool = True
    scores_prompts: bool
    scores_alone: bool
    names_ids: bool
    returns_ids: bool
    ignores_end: bool
    counts_tokens: bool
    card: ModelCard
    version: str = ""
    refusals: tuple[tuple[str, str], ...] = ()
    is_chat_only: bool = False

    @property
    def can_score(self) -> bool:
        """Whether given tokens are scored."""
        return self.scores_prompts

    def why_not(self, ability: str) -> str:
        """Return the endpoint's own words for what it cannot do; empty where it can, or was not asked."""
        return dict(self.refusals).get(ability, "")

    def line(self) -> str:
        """Return on one line what the endpoint is and what it can do."""
        abilities = {
            "token ids as prompts": self.takes_ids,
            "log probabilities of prompts (echo)": self.scores_prompts,
            "tokens by id": self.names_ids or self.returns_ids,
            "ignore_eos": self.ignores_end,
            "usage": self.counts_tokens,
        }
        can = ", ".join(name for name, is_there in abilities.items() if is_there) or "nothing beyond text"
        cannot = ", ".join(name for name, is_there in abilities.items() if not is_there)
        who = " ".join(part for part in (self.card.owned_by, self.version) if part) or "an unknown server"
        limit = self.card.max_positions
        positions = "an unknown number of" if limit is None else str(limit)
        lacks = f"; no {cannot}" if cannot else ""
        return f"OpenAI API of {who}: {self.card.id}, {positions} positions; {can}{lacks}"


class _Questions:
    """Asks one thing after another and keeps the refusals."""

    def __init__(self, client: OpenAIClient, model: str) -> None:
        self._client, self._model = client, model
        self.refusals: dict[str, str] = {}

    def ask(self, ability: str, prompt: str | tuple[int, ...], max_tokens: int = 1, **fields: Any) -> Completed | None:
        """Send a prompt with fields; None where the endpoint refuses them."""
        prompts: Any = [prompt]
        try:
            return self._client.complete(self._model, prompts, max_tokens=max_tokens, **GREEDY, **fields)
        except RequestError as error:
            self.refusals[ability] = shortened(error.problem, 300)
            return None

    def lacks(self, ability: str, is_missing: bool) -> bool:
        """Note that an answer lacks what was asked for; returns whether it is there."""
        if is_missing:
            self.refusals.setdefault(ability, "the field is accepted and has no effect")
        return not is_missing


def find_capabilities(client: OpenAIClient, card: ModelCard, may_chat: bool = False) -> Capabilities:
    """Find out what an endpoint can do with a model.

    Args:
        client: connection to the endpoint.
        card: the model.
        may_chat: whether an endpoint is of use that answers conversations alone.

    Raises:
        UnreachableError: no server answers, or it refuses the key.
        ConfigError: the endpoint completes no prompt at all.
    """
    questions = _Questions(client, card.id)
    plain, takes_ids = _complete_plainly(questions)
    if plain is None and may_chat and (chat := _find_chat(client, card, questions)) is not None:
        return chat
    if plain is None:
        raise ConfigError(
            f"model '{card.id}' at {client.url} completes no prompt: {questions.refusals['text as prompts']}",
            "evaluation and benchmark ask /v1/completions; give an endpoint that has it",
        )
    prompt: str | tuple[int, ...] = PROBE_IDS if takes_ids else PROBE_TEXT
    returned = questions.ask("return_token_ids", prompt, return_token_ids=True)
    ignoring = questions.ask("ignore_eos", prompt, 8, ignore_eos=True)
    scores_prompts = _scores_prompts(questions, prompt)
    by_id = {"return_tokens_as_token_ids": True}
    named = questions.ask("return_tokens_as_token_ids", prompt, logprobs=1, **by_id)
    return Capabilities(
        takes_ids=takes_ids,
        scores_prompts=scores_prompts,
        scores_alone=scores_prompts and _scores_alone(questions, prompt),
        names_ids=named is not None and questions.lacks("return_tokens_as_token_ids", not _are_named(named.choices[0])),
        returns_ids=returned is not None and questions.lacks("return_token_ids", not returned.choices[0].token_ids),
        ignores_end=ignoring is not None and questions.lacks("ignore_eos", ignoring.completion_tokens not in (None, 8)),
        counts_tokens=plain.prompt_tokens is not None and plain.completion_tokens is not None,
        card=card,
        version=client.version(),
        refusals=tuple(questions.refusals.items()),
        is_encoder_decoder=card.is_encoder_decoder,
    )


def _complete_plainly(questions: _Questions) -> tuple[Completed | None, bool]:
    """Return the first completion that comes, None where none does, and whether its prompt was token ids."""
    plain = questions.ask("token ids as prompts", PROBE_IDS)
    if plain is not None and questions.lacks("token ids as prompts", plain.prompt_tokens not in (None, len(PROBE_IDS))):
        return plain, True
    return questions.ask("text as prompts", PROBE_TEXT), False


def _find_chat(client: OpenAIClient, card: ModelCard, questions: _Questions) -> Capabilities | None:
    """Find out what an endpoint of conversations can do; None where it answers none."""
    body = {"model": card.id, "messages": [{"role": "user", "content": PROBE_TEXT}], "max_tokens": 8, **GREEDY}

    def ask(**fields: Any) -> tuple[Any, Any]:
        answer = client.post(CHAT, {**body, **fields})
        return (answer.get("usage") or {}).get("completion_tokens"), answer["choices"][0].get("token_ids")

    def gives(ability: str, is_there: Callable[[Any, Any], bool], **fields: Any) -> bool:
        try:
            return questions.lacks(ability, not is_there(*ask(**fields)))
        except RequestError as error:
            questions.refusals[ability] = shortened(error.problem, 300)
        except (KeyError, IndexError, TypeError, AttributeError):
            questions.refusals[ability] = "the answer has no choices"
        return False

    if not gives("chat", lambda count, ids: True):
        return None
    return Capabilities(
        takes_ids=False,
        scores_prompts=False,
        scores_alone=False,
        names_ids=False,
        returns_ids=gives("return_token_ids", lambda count, ids: bool(ids), return_token_ids=True),
        ignores_end=gives("ignore_eos", lambda count, ids: count in (None, 8), ignore_eos=True),
        counts_tokens=gives("usage", lambda count, ids: count is not None),
        card=card,
        version=client.version(),
        refusals=tuple(questions.refusals.items()),
        is_chat_only=True,
    )


def _scores_prompts(questions: _Questions, prompt: str | tuple[int, ...]) -> bool:
    ability = "echo with logprobs"
    answer = questions.ask(ability, prompt, echo=True, logprobs=1)
    if answer is None:
        return False
    scores, top = answer.choices[0].log_probs or (), answer.choices[0].top or ()
    # The prompt's first token has no log probability; one token behind the prompt was generated.
    given = len(prompt) if isinstance(prompt, tuple) else max(2, len(scores) - 1)
    is_there = len(scores) == len(top) == given + 1 and scores[0] is None and None not in scores[1:]
    return questions.lacks(ability, not is_there)


def _scores_alone(questions: _Questions, prompt: str | tuple[int, ...]) -> bool:
    answer = questions.ask("max_tokens=0 with echo", prompt, 0, echo=True, logprobs=1)
    if answer is None:
        return False
    scores = answer.choices[0].log_probs or ()
    given = len(prompt) if isinstance(prompt, tuple) else answer.prompt_tokens
    return questions.lacks("max_tokens=0 with echo", given is None or len(scores) != given)


def _are_named(choice: Choice) -> bool:
    return bool(choice.tokens) and all(name.startswith(TOKEN_PREFIX) for name in choice.tokens or ())
