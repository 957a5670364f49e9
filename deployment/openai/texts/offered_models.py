"""What the endpoint offers: each model's limits and names, its tokenizer and how its conversations are written."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from deployment.openai.errors import ApiError
from deployment.openai.texts.templates import ChatTemplate
from deployment.openai.texts.texts import Texts
from deployment.openai.tools.dialects import Dialect, Thoughts, dialect_named, find_dialect, find_thoughts
from deployment.openai.tools.harmony import is_harmony
from export_scripts.repository.tokenizer_models.slipway_tokenizer import FileTokenizer
from handover.chat import Chat
from handover.errors import nearest, shortened

LORA_NAME = "lora_name"
"""The tensor by which a request names its adapter."""
_LONGEST_TOKEN_BYTES = 128
"""Of most vocabularies, and so in preprocessing; longer tokens are looked for once a text is that long."""
_UNLIMITED_TEXT_BYTES = 1 << 20
"""The limit where a model has no last position; preprocessing has the same."""


@dataclass(frozen=True)
class Model:
    """One model of Triton that takes token ids.

    Attributes:
        names: under which clients may ask for it; the first is the one that it was exported under.
        engine: Triton's name.
        inputs, outputs: names of its tensors.
        max_positions: prompt and output of one sequence, in tokens; None: no limit is known.
        vocab_size: number of tokens; None where it is not known.
        is_encoder_decoder: whether a prompt is an encoder's input.
        rows: sequences that it computes at a time.
        is_decoupled: whether each token is sent when it is made.
        texts: its tokenizer.
        chat: how its conversations are written; None: that is not known.
        chat_problem: why that cannot be used.
        tool_dialect: name of the dialect of its tool calls; empty: it is found by the chat template.
        adapter: LoRA adapter that its requests name; empty: the plain model.
        adapters: directories of those that it has when the endpoint starts, by name.
        settings: what else clients are told: parallelism, number formats, digests of the weights and the repository.
    """

    names: tuple[str, ...]
    engine: str
    inputs: frozenset[str]
    outputs: frozenset[str]
    max_positions: int | None
    vocab_size: int | None
    is_encoder_decoder: bool
    rows: int
    is_decoupled: bool
    texts: Texts
    chat: Chat | None = None
    chat_problem: str = ""
    tool_dialect: str = ""
    adapter: str = ""
    adapters: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)

    def check_ids(self, ids: Sequence[int], name: str) -> None:
        """Refuse tokens that the vocabulary does not have; ApiError."""
        if self.vocab_size is not None and ids and max(ids) >= self.vocab_size:
            raise ApiError(f"{name} holds token {max(ids)}", f"the vocabulary has {self.vocab_size} tokens", param=name)

    @property
    def sure_text_bytes(self) -> int:
        """Bytes up to which a text may fit the model's positions in any vocabulary that is known."""
        return _LONGEST_TOKEN_BYTES * self.max_positions if self.max_positions else _UNLIMITED_TEXT_BYTES

    def check_length(self, text: str, name: str) -> None:
        """Refuse a text that cannot fit the model's positions before it is encoded; ApiError."""
        size = len(text.encode())
        if size <= self.sure_text_bytes:
            return
        most = max(self.sure_text_bytes, self._longest_token_bytes * (self.max_positions or 0))
        if size > most:
            positions = f"the model has {self.max_positions} positions" if self.max_positions else "texts have a limit"
            raise ApiError(
                f"{name} has {size} bytes, and {positions}",
                f"a text has at most {most} bytes here",
                param=name,
                code="context_length_exceeded",
            )

    @cached_property
    def _longest_token_bytes(self) -> int:
        ids = range(self.vocab_size or 0)
        return max((len(self.texts.decode([token]).encode()) for token in ids), default=0)

    @property
    def special(self) -> Mapping[str, int]:
        """Ids of the special tokens that its answers may have, by name."""
        tokenizer = self.texts.tokenizer
        return tokenizer.special if isinstance(tokenizer, FileTokenizer) else {}

    @cached_property
    def dialect(self) -> Dialect | None:
        """How it writes tool calls; None: that is not known."""
        if self.tool_dialect:
            return dialect_named(self.tool_dialect)
        return find_dialect(self.chat.all_templates[-1]) if self.chat else None

    @cached_property
    def has_channels(self) -> bool:
        """Whether it writes harmony, whose messages have channels, in place of a dialect."""
        return self.chat is not None and not self.tool_dialect and is_harmony(self.chat.template)

    @cached_property
    def thoughts(self) -> Thoughts | None:
        """How it marks what it thinks before it answers; None: not at all."""
        return find_thoughts("\n".join(self.chat.all_templates)) if self.chat else None

    @cached_property
    def template(self) -> ChatTemplate | None:
        """What writes its conversations. It runs the checkpoint's own program: in a text process alone.

        Raises:
            ArtefactError: it cannot be read.
        """
        if self.chat is None:
            return None
        tokenizer = self.texts.tokenizer if isinstance(self.texts.tokenizer, FileTokenizer) else None
        return ChatTemplate(self.chat, self.texts.directory, self.texts.tokenizer.encode, tokenizer)


class Models:
    """All models of one server.

    Attributes:
        adapted: the one whose adapters have names beside these; None: no model takes adapters.
    """

    def __init__(self, found: Sequence[Model]) -> None:
        self.all = tuple(found)
        self._by_name = {name: model for model in reversed(self.all) for name in model.names}
        self.adapted = next((model for model in self.all if LORA_NAME in model.inputs), None)

    @property
    def names(self) -> list[str]:
        """Every name that a request may give."""
        return [name for model in self.all for name in model.names]

    def find(self, name: str | None) -> Model:
        """Return the model of a name; without one, the only model that there is.

        Raises:
            ApiError: there is no such model, or the name is missing where there are several.
        """
        if name is None and len(self.all) == 1:
            return self.all[0]
        if name is None:
            raise ApiError("model is missing", f"it is one of {', '.join(self.names)}", param="model")
        if name not in self._by_name:
            raise self.unknown(name)
        return self._by_name[name]

    def find_base(self, name: str | None) -> Model:
        """Return the model of a name, which may be that of an adapter; ApiError: it cannot be one."""
        if name is not None and name not in self._by_name and self.adapted is not None:
            return self.adapted
        return self.find(name)

    def unknown(self, name: str, adapters: Collection[str] = (), param: str = "model") -> ApiError:
        """Return the error that there is neither a model nor an adapter of a name."""
        known = [*self.names, *adapters] if param == "model" else list(adapters)
        return ApiError(
            f"there is no {'model' if param == 'model' else 'adapter'} '{shortened(name, 80)}'",
            nearest(shortened(name, 80), known),
            status=404,
            param=param,
            code="model_not_found",
        )
