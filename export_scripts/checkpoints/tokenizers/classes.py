"""Which class of transformers reads a tokenizer's files, and what that class makes of a vocabulary.

Rules: transformers 5, ``models/auto/tokenization_auto.py`` and the ``tokenization_*.py`` of each class. Those of
``BUILDERS`` take the vocabulary and the merges of whatever file there is, and cut texts and join tokens in their own
way; every other class takes ``tokenizer.json`` as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

GENERIC = "TokenizersBackend"
_REGISTERED = {
    **dict.fromkeys(("gpt2", "opt", "gptj", "starcoder2"), "GPT2Tokenizer"),
    **dict.fromkeys(("gpt_bigcode", "mistral", "mixtral", "nemotron"), GENERIC),
    **dict.fromkeys(("qwen2", "qwen3"), "Qwen2Tokenizer"),
    **dict.fromkeys(("gemma", "gemma2"), "GemmaTokenizer"),
    **{"gpt_neox": "GPTNeoXTokenizer", "xglm": "XGLMTokenizer", "t5": "T5Tokenizer", "mt5": "T5Tokenizer"},
}
"""Classes by the type of a model."""
_NOT_BELIEVED = ("nemotron", "qwen2")
"""Types of models whose files name another class than they were made with."""
_OF_MISTRAL = ("mistral", "mixtral")
_SPACE = "▁"
_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_END_OF_TEXT = "<|endoftext|>"
_CODE_LLAMAS = {
    "prefix_token": "▁<PRE>",
    "middle_token": "▁<MID>",
    "suffix_token": "▁<SUF>",
    "eot_token": "▁<EOT>",
    "fill_token": "<FILL_ME>",
}
DEFAULTS: Mapping[str, Mapping[str, str | bool]] = {
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "CodeLlamaTokenizer": {
        **{"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True},
        **_CODE_LLAMAS,
    },
    "GPT2Tokenizer": dict.fromkeys(("unk_token", "bos_token", "eos_token"), _END_OF_TEXT),
    "GPTNeoXTokenizer": {
        **dict.fromkeys(("unk_token", "bos_token", "eos_token"), _END_OF_TEXT),
        "pad_token": "<|padding|>",
    },
    "Qwen2Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), _END_OF_TEXT),
    "GemmaTokenizer": {
        **{"unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>"},
        **{"pad_token": "<pad>", "mask_token": "<mask>"},
    },
    "T5Tokenizer": {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
    "XGLMTokenizer": {
        **{"bos_token": "<s>", "eos_token": "</s>", "sep_token": "</s>"},
        **{"cls_token": "<s>", "unk_token": "<unk>", "pad_token": "<pad>"},
    },
}
"""Special tokens, and settings, that a class has where no file says otherwise."""
AROUND: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "T5Tokenizer": ((), ("</s>",)),
    "XGLMTokenizer": (("</s>",), ()),
}
"""What a class puts before and behind a text, whatever the files say."""
WITHOUT_THE_FILES = ("GPTNeoXTokenizer",)
"""Classes that put no tokens around a text because ``tokenizer.json`` says so."""
UNIGRAM = ("T5Tokenizer", "XGLMTokenizer")
_SENTINELS = 100
EXTRA: Mapping[str, tuple[str, ...]] = {
    "CodeLlamaTokenizer": tuple(_CODE_LLAMAS.values()),
    "XGLMTokenizer": tuple(f"<madeupword{number}>" for number in range(7)),
}
"""Special tokens without a name that a class has where no file lists some."""
OF_PAIRS = ("GPT2Tokenizer", "GPTNeoXTokenizer", "Qwen2Tokenizer")
"""Classes that read ``vocab.json`` with ``merges.txt``."""


@dataclass(frozen=True)
class Vocabulary:
    """What a class is given.

    Attributes:
        tokens: ids by token; for Unigram, each token with its score.
        merges: pairs that become one token, the first ones first.
        charsmap: SentencePiece's table of characters.
    """

    tokens: Any
    merges: list[tuple[str, str]] = field(default_factory=list)
    charsmap: bytes = b""


def class_of(model_type: str, declared: str, is_byte_level: bool) -> str:
    """Name the class that ``AutoTokenizer`` takes, without ``Fast`` at its end.

    Args:
        model_type: of ``config.json``.
        declared: ``tokenizer_class`` of ``tokenizer_config.json``, or else of ``config.json``.
        is_byte_level: whether there is a ``tokenizer.json`` of bytes.
    """
    name = _class_of(model_type, declared.removesuffix("Fast"), is_byte_level)
    return GENERIC if is_byte_level and name in BUILDERS and name not in OF_PAIRS else name  # of pieces, not of bytes


def _class_of(model_type: str, declared: str, is_byte_level: bool) -> str:
    registered = _REGISTERED.get(model_type, "")
    is_odd = model_type in _NOT_BELIEVED
    if declared == "LlamaTokenizer" and is_byte_level and not is_odd and model_type not in _OF_MISTRAL:
        return GENERIC
    if not declared or not registered or declared == registered:
        return declared or registered or GENERIC
    if registered == GENERIC:
        return GENERIC
    return registered if is_odd else declared


def _byte_level(vocabulary: Vocabulary, settings: Mapping[str, Any]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    made = Tokenizer(models.BPE(**_pairs(vocabulary), continuing_subword_prefix="", end_of_word_suffix=""))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(settings.get("add_prefix_space")))
    made.decoder = decoders.ByteLevel()
    return made


def _gpt_neox(vocabulary: Vocabulary, settings: Mapping[str, Any]) -> Any:
    from tokenizers import normalizers

    made = _byte_level(vocabulary, settings)
    made.normalizer = normalizers.NFC()
    return made


def _qwen2(vocabulary: Vocabulary, settings: Mapping[str, Any]) -> Any:
    from tokenizers import Regex, normalizers, pre_tokenizers

    made = _byte_level(vocabulary, settings)
    made.normalizer = normalizers.NFC()
    cut = pre_tokenizers.Split(Regex(_QWEN2_PATTERN), behavior="isolated", invert=False)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=bool(settings.get("add_prefix_space")), use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([cut, letters])
    return made


def _llama(vocabulary: Vocabulary, settings: Mapping[str, Any], **more: Any) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    has_space = settings.get("add_prefix_space") in (True, None)
    first = "always" if settings.get("legacy") else "first"
    made = Tokenizer(models.BPE(**_pairs(vocabulary), fuse_unk=True, byte_fallback=True, **more))
    scheme = first if has_space else "never"
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme, split=False)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_space or more:
        steps.append(decoders.Strip(content=" ", left=1))
    made.decoder = decoders.Sequence(steps)
    return made


def _code_llama(vocabulary: Vocabulary, settings: Mapping[str, Any]) -> Any:
    return _llama(vocabulary, {**settings, "legacy": False}, unk_token=str(settings["unk_token"]))


def _gemma(vocabulary: Vocabulary, settings: Mapping[str, Any]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    unknown = str(settings["unk_token"])
    made = Tokenizer(models.BPE(**_pairs(vocabulary), fuse_unk=True, unk_token=unknown, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Split(pattern=" ", behavior="merged_with_previous", invert=False)
    made.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    made.normalizer = normalizers.Replace(" ", _SPACE)
    return made


def _xglm(vocabulary: Vocabulary, settings: Mapping[str, Any]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    made = Tokenizer(models.Unigram(vocab=vocabulary.tokens, unk_id=3, byte_fallback=False))
    steps = [normalizers.Precompiled(vocabulary.charsmap)] if vocabulary.charsmap else []
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(Regex(" {2,}"), " ")])
    scheme = "always" if settings.get("add_prefix_space", True) else "never"
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme)
    made.decoder = decoders.Metaspace(replacement=_SPACE, prepend_scheme=scheme)
    return made


def _t5(vocabulary: Vocabulary, settings: Mapping[str, Any]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    made = Tokenizer(models.Unigram(vocab=vocabulary.tokens, unk_id=2, byte_fallback=False))
    if vocabulary.charsmap:
        made.normalizer = normalizers.Precompiled(vocabulary.charsmap)
    words = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="always", split=True)
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), words])
    made.decoder = decoders.Metaspace(replacement=_SPACE, prepend_scheme="always", split=True)
    return made


def sentinels(name: str, settings: Mapping[str, Any]) -> list[str]:
    """List T5's marks for gaps in the order of their ids: their numbers go down while ids go up."""
    count = int(settings.get("extra_ids", _SENTINELS)) if name == "T5Tokenizer" else 0
    return [f"<extra_id_{number}>" for number in reversed(range(count))]


def with_sentinels(name: str, vocabulary: Vocabulary, settings: Mapping[str, Any]) -> Vocabulary:
    """Add T5's marks for gaps behind the pieces."""
    more = [(token, 0.0) for token in sentinels(name, settings)]
    return replace(vocabulary, tokens=[*vocabulary.tokens, *more]) if more else vocabulary


def of_pieces(vocabulary: Vocabulary, unknown: tuple[int, str], has_bytes: bool) -> Any:
    """Make what a class without a way of its own reads from a SentencePiece model; it puts no space before a text."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    model: Any
    if isinstance(vocabulary.tokens, dict):
        model = models.BPE(**_pairs(vocabulary), unk_token=unknown[1], fuse_unk=True, byte_fallback=has_bytes)
    else:
        model = models.Unigram(vocab=vocabulary.tokens, unk_id=unknown[0], byte_fallback=has_bytes)
    made = Tokenizer(model)
    steps = [normalizers.Precompiled(vocabulary.charsmap)] if vocabulary.charsmap else []
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    joined = [decoders.ByteFallback(), decoders.Fuse()] if has_bytes else []
    made.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), *joined])
    return made


def _pairs(vocabulary: Vocabulary) -> dict[str, Any]:
    return {"vocab": vocabulary.tokens, "merges": vocabulary.merges, "dropout": None}


BUILDERS: Mapping[str, Callable[[Vocabulary, Mapping[str, Any]], Any]] = {
    "LlamaTokenizer": _llama,
    "CodeLlamaTokenizer": _code_llama,
    "GPT2Tokenizer": _byte_level,
    "GPTNeoXTokenizer": _gpt_neox,
    "Qwen2Tokenizer": _qwen2,
    "GemmaTokenizer": _gemma,
    "T5Tokenizer": _t5,
    "XGLMTokenizer": _xglm,
}
"""Makes a pipeline of the library ``tokenizers``, by class."""
