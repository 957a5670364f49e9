"""The tokenizer of a model behind an OpenAI API that tokenizes on request, as vLLM's and Slipway's endpoints do."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from evaluation.client.errors import RequestError
from evaluation.client.openai_client import OpenAIClient
from evaluation.client.served_model import Target
from handover.errors import shortened

_SAMPLE = "a"
_MOST_KEPT = 1 << 16  # texts whose tokens are remembered


class EndpointTokenizer:
    """Asks ``/tokenize`` and ``/detokenize``, text by text, from any thread.

    Raises:
        RequestError: the API has no such paths.
    """

    unknown = ""

    def __init__(self, target: Target) -> None:
        self._client, self._lock, self._model = OpenAIClient(target.served.endpoint), threading.Lock(), target.model
        ending = target.interface.is_encoder_decoder and target.served.end_id is not None
        self._ending = (target.served.end_id,) if ending else ()
        self._tokens_of = lru_cache(_MOST_KEPT)(self._ask_tokens)
        whole, own = self.encode(_SAMPLE), self.encode_part(_SAMPLE)
        places = (place for place in range(len(whole) + 1) if whole[place : place + len(own)] == own)
        self._before = tuple(whole[: next(places, 0)])
        self.decode(own)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, with the start and end tokens that the tokenizer adds, if any."""
        ids = self._tokens_of(text, True)
        ending = len(self._ending)  # an encoder's, which is added to what a tokenizer gives
        return list(ids[:-ending] if ending and ids[-ending:] == self._ending else ids)

    def encode_part(self, text: str) -> list[int]:
        """Return the token ids of a part of a text, such as a word or an answer, without added tokens."""
        return list(self._tokens_of(text, False))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without the start token that the tokenizer adds."""
        count = len(self._before)
        own = list(ids[count:] if count and tuple(ids[:count]) == self._before else ids)
        text = self._ask("/detokenize", {"tokens": own}, "prompt")
        return str(text)

    def _ask_tokens(self, text: str, has_special_tokens: bool) -> tuple[int, ...]:
        return tuple(self._ask("/tokenize", {"prompt": text, "add_special_tokens": has_special_tokens}, "tokens"))

    def _ask(self, path: str, body: dict[str, Any], name: str) -> Any:
        with self._lock:
            found = self._client.post(path, {"model": self._model, **body})
        if not isinstance(found, dict) or name not in found:
            raise RequestError(f"{path} answered without {name}: {shortened(str(found))}")
        return found[name]
