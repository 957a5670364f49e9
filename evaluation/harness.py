"""lm-evaluation-harness on a deployment: the model class ``slipway``, and a command that knows it.

    python -m evaluation.harness run --model slipway --model_args url=results/.../endpoint.json --tasks lambada_openai

takes the arguments of ``lm_eval``. The harness has no plugins: a model class must be imported before it reads its
command line, which this module does; in Python ``import evaluation.harness`` is enough. Log probabilities are those of
the served model with teacher forcing.

``--data=DIRECTORY`` makes the tasks ``gsm8k_file``, ``humaneval_file``, ``mmlu_pro_file`` and ``ifeval_file`` of files
in it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

try:
    import lm_eval.tasks
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError as error:
    if __name__ == "__main__":
        if {"-h", "--help"} & set(sys.argv[1:]):
            sys.stdout.write(__doc__)
            raise SystemExit(0) from None
        raise SystemExit(f"harness: {error}\n  hint: pip install 'lm_eval==0.4.13' 'pyarrow<24'") from None
    raise

from evaluation.client.client import Client
from evaluation.client.connecting import check_tokenizer
from evaluation.client.model_connection import ModelFiles
from evaluation.client.openai_client import OpenAIClient
from evaluation.client.openai_connection import OpenAIConnection
from evaluation.client.served_identity import check_still_served
from evaluation.client.served_model import open_target
from evaluation.client.special_ids import read_special_ids
from evaluation.client.tokenizer import load_tokenizer
from evaluation.tasks.harness_files import SUFFIX, write_tasks
from evaluation.tasks.harness_writing import TextGenerator
from evaluation.tasks.scoring import Scorer
from evaluation.tasks.target import Closing, ask_all, check_takes_rows, in_batches
from handover.errors import ConfigError, ServerError, exit_status

Item = TypeVar("Item")
Answer = TypeVar("Answer")
Connection = TypeVar("Connection", bound=Closing)
_T5_POSITIONS = 512
_DATA = "--data"


@register_model("slipway")
class ServedLM(TemplateLM):  # type: ignore[misc]
    """A model that Triton serves with FasterTransformer's tensors.

    An encoder-decoder's encoder reads the context and its decoder the scored text, each encoded by itself, as the
    harness's own class for Hugging Face's models does it. Requests to an ensemble contain texts where these are encoded
    to the same token ids and the ensemble has the tensors; all others go to the model inside it.

    Args:
        url: endpoint.json, its directory, host:port of gRPC, or http://host:port/v1 of an OpenAI API.
        model: Triton's name of the model, or of an ensemble.
        tokenizer: directory of tokenizer files, if they are not beside the shards.
        max_length: positions of the model; config.ini's by default, 512 of a T5 that has no limit.
        prefix_token_id: the context of a text without one; config.ini's start_id by default, of a T5 its end_id.
        end_id: the token that ends a generation; config.ini's by default.
        rows: prompts in one request, at most what the model takes.
        batch_size: the harness's own option for ``rows``; its default of 1 leaves the number to ``rows``.
        concurrency: number of requests in flight.
        max_gen_toks: number of tokens to generate where a task does not say.
        timeout_s: limit of one request in seconds.
        model_digest: digest of the model repository that must be served.
        endpoint_key_env: environment variable with the bearer key of an OpenAI API.
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
        endpoint_key_env: str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__()
        wanted = int(batch_size) if str(batch_size).isdigit() and int(batch_size) > 1 else rows  # it may be "auto:4"
        target = open_target(url, model, model_digest, batch_size=wanted, key_env=endpoint_key_env)
        check_takes_rows(target)
        interface, served = target.interface, target.served
        is_t5 = self._is_t5 = interface.is_encoder_decoder
        self.backend = "seq2seq" if is_t5 else "causal"  # the harness then encodes context and target apart
        self._target, self._endpoint, self._timeout_s = target, served.endpoint, timeout_s
        directory = Path(_known(tokenizer or served.directory, "tokenizer", "its directory"))
        self._tokenizer = load_tokenizer(directory)
        check_tokenizer(target, self._tokenizer)
        positions = max_length or served.max_positions or (_T5_POSITIONS if is_t5 else None)
        self.max_length: int = _known(positions, "max_length", "the model's positions")
        known = read_special_ids(directory) if target.is_openai else (served.start_id, served.end_id)
        self._end_id: int = _known(known[1] if end_id is None else end_id, "end_id")
        start_id = self._end_id if is_t5 else known[0]  # to an encoder start_id means nothing
        self._prefix_id: int = _known(start_id if prefix_token_id is None else prefix_token_id, "prefix_token_id")
        self.batch_size, self._concurrency = target.batch_size, max(1, concurrency)
        self.max_gen_toks = max_gen_toks
        self._generator = TextGenerator(
            *(target.model, not interface.takes_ids, target.ids_model, self._tokenizer, self.max_length, max_gen_toks),
            *(self._prefix_id, self._end_id, is_t5),
        )

    @cached_property
    def _text_length(self) -> int:
        """Maximum number of tokens of context and target together."""
        with self._scorer() as scorer:
            return self.max_length - scorer.spare_positions(self._prefix_id)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self._end_id

    @property
    def prefix_token_id(self) -> int:
        """The context of a text without one."""
        return self._prefix_id

    @property
    def tokenizer_name(self) -> str:
        """Key of the harness's cache of requests, which depend on the served model."""
        return self._endpoint.model_digest or self._endpoint.address

    def get_model_info(self) -> dict[str, Any]:
        """Return what identifies the model in the harness's results."""
        endpoint = self._endpoint
        return {"model_digest": endpoint.model_digest, "engine": endpoint.engine, **endpoint.settings}

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Encode as the harness's own class does: with start and end tokens, unless the harness asks for none."""
        if add_special_tokens is False:
            return self._tokenizer.encode_part(string)
        return self._tokenizer.encode(string) + ([self._end_id] if self._is_t5 else [])

    def _scorer(self) -> Scorer:
        return Scorer(self._target, self._timeout_s, self._tokenizer, self._end_id)

    def _writer(self) -> Client | OpenAIConnection:
        if self._target.capabilities is None:
            return Client(self._target.url, self._timeout_s)
        files = ModelFiles(self._tokenizer, self._end_id)
        return OpenAIConnection(OpenAIClient(self._endpoint, self._timeout_s), self._target.capabilities, files)

    def _cut(self, context: Sequence[int], target: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Cut context and target on the left to the model's positions: together, or each for an encoder-decoder."""
        if self._is_t5:
            return tuple(context[-self.max_length :]), tuple(target[-self.max_length :])
        target = target[-(self._text_length - 1) :]
        return tuple(context[-(self._text_length - len(target)) :]), tuple(target)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        if not self._is_t5:
            self._text_length  # noqa: B018 (computed once, before several threads need it)

        def score(scorer: Scorer, batch: Sequence[tuple[Any, list[int], list[int]]]) -> list[tuple[float, bool]]:
            pairs = [self._cut(context, target) for _, context, target in batch]
            found = scorer.score(pairs)
            return [
                (sum(scores.log_probs), scores.argmax == target)
                for scores, (_, target) in zip(found, pairs, strict=True)
            ]

        answers = self._ask(requests, self._scorer, lambda request: len(request[1]) + len(request[2]), score)
        for request, answer in zip(requests, answers, strict=True):
            if request[0] is not None:
                self.cache_hook.add_partial("loglikelihood", request[0], answer)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log probability of whole texts, in windows of the model's positions that overlap by one token."""
        length = self.max_length if self._is_t5 else self._text_length - 1
        windows: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for number, (text,) in enumerate(request.args for request in requests):
            parts = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, length, 1)
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
        """Continue contexts up to the first of their stop strings, which is left out."""

        def write(writer: Client | OpenAIConnection, batch: Sequence[Any]) -> list[str]:
            return self._generator.generate(writer, [request.args for request in batch])

        texts = self._ask(requests, self._writer, lambda request: len(request.args[0]), write)
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _ask(
        self,
        items: Sequence[Item],
        connect: Callable[[], Connection],
        cost: Callable[[Item], int],
        send: Callable[[Connection, Sequence[Item]], Sequence[Answer]],
    ) -> list[Answer]:
        """Send requests for all items, the longest first, several in flight; answers are in the order of items."""
        order = sorted(range(len(items)), key=lambda place: -cost(items[place]))

        def ask(connection: Connection, places: Sequence[int]) -> list[tuple[Answer]]:
            return [(answer,) for answer in send(connection, [items[place] for place in places])]

        batches = in_batches(order, self.batch_size)
        found = ask_all(connect, batches, self._concurrency, ask, "lm_eval")
        answers = [found[place] for place in range(len(items))]
        errors = [answer for answer in answers if isinstance(answer, str)]
        if errors:
            raise ServerError(f"{len(errors)} of {len(items)} requests failed; the first: {errors[0]}")
        check_still_served(self._endpoint, self._target.model)
        return [answer[0] for answer in answers if not isinstance(answer, str)]


def _known(value: Any, name: str, what: str = "the id") -> Any:
    if value is None:
        raise ConfigError(f"{name} is not known: the model's files are not on this machine", f"give {name}={what}")
    return value


def main(argv: Sequence[str]) -> None:
    """Run the harness's own command line, which reads ``sys.argv`` itself; ``--data`` is ours."""
    from lm_eval.__main__ import cli_evaluate

    given = [word.partition("=")[2] for word in argv if word.startswith(f"{_DATA}=")]
    if not given:
        cli_evaluate()
        return
    with TemporaryDirectory() as directory:
        names = write_tasks(Path(given[-1]).expanduser(), Path(lm_eval.tasks.__file__).parent, Path(directory))
        if f"ifeval{SUFFIX}" in names:
            check_sentences()
        rest = [word for word in sys.argv[1:] if not word.startswith(f"{_DATA}=")]
        if any(word.startswith("--include_path") for word in rest):
            raise ConfigError(f"--include_path with {_DATA}, which includes the tasks of its files", "take one of them")
        sys.argv[1:] = [*rest, "--include_path", directory]
        cli_evaluate()


def check_sentences() -> None:
    """Refuse to begin without what IFEval counts sentences by, which would be fetched; ConfigError."""
    try:
        import nltk

        nltk.data.find("tokenizers/punkt_tab")
    except (ImportError, LookupError):
        raise ConfigError(
            "ifeval needs the packages langdetect, immutabledict and nltk, and nltk's punkt_tab",
            "pip install 'lm_eval[ifeval]==0.4.13'; python -m nltk.downloader punkt_tab; NLTK_DATA names another place",
        ) from None


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "harness"))
