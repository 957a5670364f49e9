"""lm-evaluation-harness on a deployment: the model class ``slipway``, and a command that knows it.

    python -m evaluation.harness run --model slipway --model_args url=results/.../endpoint.json --tasks lambada_openai

takes the arguments of ``lm_eval``. The harness has no plugins: somebody must import a model class before it reads its
command line, which this module does; in Python ``import evaluation.harness`` is enough. Log probabilities come from the
engine, teacher-forced, token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError as error:
    if __name__ == "__main__":
        raise SystemExit(f"harness: {error}\n  hint: pip install 'lm_eval==0.4.13' 'pyarrow<24'") from None
    raise

from evaluation.asking import ask_all, in_batches
from evaluation.client import Client
from evaluation.scoring import Scorer
from evaluation.served_model import check_identity, check_still_served, find_endpoint, inspect_endpoint
from evaluation.tensors import Sampling
from evaluation.tokenizer import load_tokenizer
from handover.errors import ConfigError, ServerError, exit_status

Item = TypeVar("Item")
Answer = TypeVar("Answer")
_T5_POSITIONS = 512
_SAMPLING_KEYS = ("temperature", "top_k", "top_p", "repetition_penalty")


@dataclass(frozen=True)
class _Plan:
    """One text to generate: token ids that it continues, tokens at most, what ends it, how it is chosen."""

    ids: list[int]
    count: int
    until: tuple[str, ...]
    sampling: Sampling


@register_model("slipway")
class ServedLM(TemplateLM):  # type: ignore[misc]
    """A model that Triton serves with FasterTransformer's tensors; of a T5, ``generate_until`` alone.

    Args:
        url: endpoint.json, its directory, or host:port of gRPC.
        model: Triton's name of the model; it must take token ids.
        tokenizer: directory of tokenizer files, if they are not beside the shards.
        max_length: positions of the model; config.ini's by default, 512 of a T5 that has no limit.
        prefix_token_id: what a text without context starts from; config.ini's start_id by default.
        end_id: the token that ends a generation; config.ini's by default.
        rows: of a request, at most what the model takes.
        batch_size: the harness's own word for that; its default of 1 says nothing, and leaves it to ``rows``.
        concurrency: requests in flight.
        max_gen_toks: tokens to generate where a task does not say.
        timeout_s: limit of one request.
        model_digest: digest of the model repository that must be served.
    """

    def __init__(
        self,
        url: str,
        model: str = "fastertransformer",
        tokenizer: str | None = None,
        max_length: int | None = None,
        prefix_token_id: int | None = None,
        end_id: int | None = None,
        rows: int = 16,
        batch_size: int | str = 1,
        concurrency: int = 2,
        max_gen_toks: int = 256,
        timeout_s: float = 600.0,
        model_digest: str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__()
        endpoint = find_endpoint(url)
        check_identity(endpoint, model_digest)
        with Client(endpoint.grpc_url) as client:
            interface = client.describe(model)
        if not interface.takes_ids:
            raise ConfigError(
                f"model '{model}' at {endpoint.grpc_url} takes no token ids, which log probabilities need",
                "take model=fastertransformer",
            )
        self._is_t5 = interface.is_encoder_decoder
        served = inspect_endpoint(endpoint, interface.parameters)
        self._endpoint, self._model, self._timeout_s = endpoint, model, timeout_s
        self._tokenizer = load_tokenizer(Path(_known(tokenizer or served.directory, "tokenizer", "its directory")))
        positions = max_length or served.max_positions or (_T5_POSITIONS if self._is_t5 else None)
        self.max_length: int = _known(positions, "max_length", "the model's positions")
        self._prefix_id: int = _known(
            served.start_id if prefix_token_id is None else prefix_token_id, "prefix_token_id"
        )
        self._end_id: int = _known(served.end_id if end_id is None else end_id, "end_id")
        wanted = int(batch_size) if str(batch_size).isdigit() and int(batch_size) > 1 else rows  # it may be "auto:4"
        self.batch_size, self._concurrency = max(1, min(wanted, interface.max_batch_size)), max(1, concurrency)
        self.max_gen_toks = max_gen_toks
        with Client(endpoint.grpc_url, timeout_s) as client:
            spare = 0 if self._is_t5 else Scorer(client, model, 1).spare_positions(self._prefix_id)
        self._text_length = self.max_length - spare

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self._end_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context."""
        return self._prefix_id

    @property
    def tokenizer_name(self) -> str:
        """For the harness's cache of requests: ours depend on the served model."""
        return self._endpoint.model_digest or self._endpoint.grpc_url

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes into its results: which model it was."""
        endpoint = self._endpoint
        return {"model_digest": endpoint.model_digest, "engine": endpoint.engine, **endpoint.settings}

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Encode; no special token is ever added."""
        return self._tokenizer.encode(string)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        if self._is_t5:
            raise ConfigError(
                f"model '{self._model}' is an encoder-decoder, and no served T5 scores given tokens",
                "take tasks that generate (output_type: generate_until)",
            )

        def score(client: Client, batch: Sequence[tuple[Any, list[int], list[int]]]) -> list[tuple[float, bool]]:
            texts = [(context + target)[-self._text_length :] for _, context, target in batch]
            targets = [target[-(self._text_length - 1) :] for _, _, target in batch]
            firsts = [len(text) - len(target) for text, target in zip(texts, targets, strict=True)]
            found = Scorer(client, self._model, self.batch_size).score(texts, firsts)
            return [
                (sum(scores.log_probs), list(scores.argmax) == target)
                for scores, target in zip(found, targets, strict=True)
            ]

        answers = self._ask(requests, lambda request: len(request[1]) + len(request[2]), score)
        for request, answer in zip(requests, answers, strict=True):
            if request[0] is not None:
                self.cache_hook.add_partial("loglikelihood", request[0], answer)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log probability of whole texts, in windows of the model's positions that overlap by one token."""
        windows: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for number, (text,) in enumerate(request.args for request in requests):
            parts = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self._text_length - 1, 1)
            for context, target in map(make_disjoint_window, parts):
                windows.append((None, context, target))
                owners.append(number)
        totals = [0.0] * len(requests)
        scored = self._loglikelihood_tokens(windows)
        for number, (log_prob, _) in zip(owners, scored, strict=True):
            totals[number] += log_prob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue contexts until one of their stop strings comes, which is left out."""
        texts = self._ask(requests, lambda request: len(request.args[0]), self._generate)
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _generate(self, client: Client, batch: Sequence[Any]) -> list[str]:
        plans = [self._plan(*request.args) for request in batch]
        texts = [""] * len(plans)
        for sampling in {plan.sampling for plan in plans}:  # which rows of a request share
            rows = [row for row, plan in enumerate(plans) if plan.sampling == sampling]
            made = client.generate_ids(
                [plans[row].ids for row in rows],
                [plans[row].count for row in rows],
                model=self._model,
                sampling=sampling,
                end_id=self._end_id,
                stop_words=[[self.tok_encode(text) for text in plans[row].until] for row in rows],
                is_encoder_decoder=self._is_t5,
            )
            for row, generation in zip(rows, made, strict=True):
                texts[row] = self._text(plans[row], generation.tokens)
        return texts

    def _plan(self, context: str, settings: dict[str, Any]) -> _Plan:
        how = normalize_gen_kwargs(settings, self.max_gen_toks)
        count = min(int(how["max_gen_toks"]), self.max_length - 1)
        ids = self.tok_encode(context) or [self.prefix_token_id]
        end = [self._end_id] if self._is_t5 else []  # an encoder's input has one
        ids = ids[-(self.max_length - (len(end) or count)) :] + end
        return _Plan(ids, count, tuple(text for text in how["until"] if text), _sampling(how))

    def _text(self, plan: _Plan, tokens: Sequence[int]) -> str:
        ended = tokens[:-1] if tokens and tokens[-1] == self._end_id else tokens
        given = [] if self._is_t5 else plan.ids  # decoded together: a tokenizer may hide the space before a first token
        text = self._tokenizer.decode([*given, *ended])[len(self._tokenizer.decode(given)) :]
        return text[: min((text.find(stop) for stop in plan.until if stop in text), default=len(text))]

    def _ask(
        self,
        items: Sequence[Item],
        cost: Callable[[Item], int],
        send: Callable[[Client, Sequence[Item]], Sequence[Answer]],
    ) -> list[Answer]:
        """Ask about all items, the long ones first, several requests in flight; answers in the order of items."""
        order = sorted(range(len(items)), key=lambda place: -cost(items[place]))

        def ask(client: Client, places: Sequence[int]) -> list[tuple[Answer]]:
            return [(answer,) for answer in send(client, [items[place] for place in places])]

        batches = in_batches(order, self.batch_size)
        found = ask_all(self._endpoint.grpc_url, self._timeout_s, batches, self._concurrency, ask, "lm_eval")
        answers = [found[place] for place in range(len(items))]
        errors = [answer for answer in answers if isinstance(answer, str)]
        if errors:
            raise ServerError(f"{len(errors)} of {len(items)} requests failed; the first: {errors[0]}")
        check_still_served(self._endpoint, self._model)
        return [answer[0] for answer in answers if not isinstance(answer, str)]


def _sampling(how: dict[str, Any]) -> Sampling:
    """Translate the harness's words; greedy where it does not sample."""
    if not how.get("do_sample") or not how.get("temperature"):
        return Sampling()
    given = {name: how[name] for name in _SAMPLING_KEYS if how.get(name) is not None}
    return Sampling(**{"top_k": 0, "top_p": 1.0, **given})


def _known(value: Any, name: str, what: str = "the id") -> Any:
    if value is None:
        raise ConfigError(f"{name} is not known: the model's files are not on this machine", f"give {name}={what}")
    return value


def main(argv: Sequence[str]) -> None:
    """Run the harness's own command line, which reads ``sys.argv`` itself."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "harness"))
