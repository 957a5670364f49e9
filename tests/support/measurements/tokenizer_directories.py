"""Made-up directories of transformers' tokenizers: every form that the files have had, and what each may leave out."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LINES = ["The quick brown fox jumps over the lazy dog", "Once upon a time there was a small boat"] * 20
LINES += ["hello world user assistant system 0123 [INST]", "das Mädchen isst eine Brezel, naïve café"] * 20
END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PLAIN = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}


class Directory(NamedTuple):
    """A tokenizer's files.

    Attributes:
        model_type: of the model beside it.
        files: contents by name.
    """

    model_type: str
    files: Mapping[str, bytes]

    def write(self, folder: Path) -> Path:
        """Write them, with a ``config.json``."""
        folder.mkdir(parents=True)
        for name, content in {"config.json": _json({"model_type": self.model_type}), **self.files}.items():
            (folder / name).write_bytes(content)
        return folder


def _json(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode()


@cache
def byte_pairs() -> dict[str, bytes]:
    """``vocab.json`` and ``merges.txt``, as GPT-2 has them."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(LINES, trainer)
    model = json.loads(made.to_str())["model"]
    merges = "\n".join(pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"])
    return {"vocab.json": _json(model["vocab"]), "merges.txt": f"#version: 0.2\n{merges}\n".encode()}


@cache
def pieces(kind: str = "bpe", **more: Any) -> bytes:
    """A SentencePiece model."""
    stream = io.BytesIO()
    how = {"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1, "byte_fallback": True, "vocab_size": 340, **more}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_writer=stream,
        model_type=kind,
        minloglevel=2,
        hard_vocab_limit=False,
        num_threads=1,
        **how,
    )
    return stream.getvalue()


IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def pipeline(kind: str) -> Tokenizer:
    """A ``tokenizer.json``'s content: of bytes, or of pieces as Llama 2 has it."""
    if kind == "bytes":
        vocabulary = json.loads(byte_pairs()["vocab.json"])
        merges = [tuple(line.split(" ")) for line in byte_pairs()["merges.txt"].decode().splitlines()[1:]]
        made = Tokenizer(models.BPE(vocabulary, merges))
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        made.add_special_tokens([END])
        return made
    model = sentencepiece.SentencePieceProcessor(model_proto=pieces(**IDENTITY))
    vocabulary = {model.id_to_piece(number): number for number in range(model.get_piece_size())}
    cuts = [(p[:at], p[at:]) for p in vocabulary for at in range(1, len(p))]
    merges = [cut for cut in cuts if cut[0] in vocabulary and cut[1] in vocabulary]
    merges.sort(key=lambda cut: vocabulary["".join(cut)])
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken(name, normalized=False) for name in ("<unk>", "<s>", "</s>")])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)])
    return made


def _described(kind: str, *added: str | AddedToken, padding: str = "") -> bytes:
    made = pipeline(kind)
    made.add_tokens([each if isinstance(each, AddedToken) else AddedToken(each, special=True) for each in added])
    if padding:
        made.enable_padding(pad_id=0, pad_token=padding)
    return made.to_str().encode()


def _decoder(first: int, *tokens: str, **flags: bool) -> dict[str, Any]:
    return {str(first + n): {"content": each, **PLAIN, "special": True, **flags} for n, each in enumerate(tokens)}


def _pair(model_type: str = "gpt2", map_: Any = None, added: Any = None, **config: Any) -> Directory:
    return Directory(model_type, {**byte_pairs(), **_beside(map_, added, config)})


def _spm(model: bytes, model_type: str = "llama", map_: Any = None, added: Any = None, **config: Any) -> Directory:
    return Directory(model_type, {"tokenizer.model": model, **_beside(map_, added, config)})


def _file(content: bytes, model_type: str = "llama", map_: Any = None, added: Any = None, **config: Any) -> Directory:
    return Directory(model_type, {"tokenizer.json": content, **_beside(map_, added, config)})


def _beside(map_: Any, added: Any, config: Mapping[str, Any]) -> dict[str, bytes]:
    named = {"special_tokens_map.json": map_, "added_tokens.json": added, "tokenizer_config.json": config}
    return {name: _json(content) for name, content in named.items() if content}


def _old(content: str) -> dict[str, Any]:
    """A token as transformers before 4.34 wrote it."""
    return {"__type": "AddedToken", "content": content, **{**PLAIN, "normalized": True}}


def of_pairs() -> dict[str, Directory]:
    """GPT-2's two files."""
    chat = {START: 330, STOP: 331}
    return {
        "bare": _pair(),
        "gptj": _pair("gptj"),
        "starcoder2": _pair("starcoder2", tokenizer_class="GPT2Tokenizer"),
        "dialogue": _pair(model_max_length=64),
        "added": _pair(added=chat),
        "added and named": _pair(added=chat, eos_token=STOP),
        "added and listed": _pair(added=chat, additional_special_tokens=[START, STOP]),
        "map": _pair(map_={"eos_token": {"content": STOP, **PLAIN}, "additional_special_tokens": [START]}, added=chat),
        "decoder": _pair(added_tokens_decoder=_decoder(330, START, STOP), eos_token=STOP),
        "decoder of spaces": _pair(added_tokens_decoder=_decoder(330, START, STOP, rstrip=True, lstrip=True)),
        "decoder of text": _pair(added_tokens_decoder=_decoder(330, "<think>", "</think>", special=False)),
        "decoder goes before the map": _pair(
            added_tokens_decoder=_decoder(330, STOP), map_={"eos_token": "<|other|>"}, eos_token=STOP
        ),
        "padding token": _pair(pad_token="<|pad|>", padding_side="left"),
        "no unknown": _pair(unk_token=None, bos_token=None),
        "old tokens": _pair(bos_token=_old(END), eos_token=_old(STOP)),
        "opt": _pair("opt", tokenizer_class="GPT2Tokenizer", add_bos_token=True, bos_token=END),
        "both ends": _pair("opt", add_bos_token=True, add_eos_token=True),
        "space in front": _pair(add_prefix_space=True),
        "own names": _pair(image_token="<image>", extra_special_tokens={"video_token": "<video>"}),
        "extra": _pair(extra_special_tokens=["<tool>", "<|x|>"]),
        "gpt_neox": _pair("gpt_neox", tokenizer_class="GPTNeoXTokenizer"),
        "gpt_neox without a class": _pair("gpt_neox", added={"    ": 330}),
        "gpt_neox begins": _pair("gpt_neox", tokenizer_class="GPTNeoXTokenizerFast", add_bos_token=True),
        "qwen2": _pair("qwen2", added_tokens_decoder=_decoder(330, START, STOP), eos_token=STOP),
        "qwen3": _pair("qwen3", tokenizer_class="Qwen2Tokenizer", added_tokens_decoder=_decoder(330, STOP)),
        "qwen2 as gpt2": _pair("qwen2", tokenizer_class="GPT2Tokenizer", added=chat),
    }


def of_pieces() -> dict[str, Directory]:
    """SentencePiece models."""
    plain, usual = pieces(**IDENTITY), pieces()
    own = pieces(**IDENTITY, user_defined_symbols="<tool>,<|x|>", control_symbols="<ctl>")
    chat = {STOP: 340, START: 341}
    llama = {"tokenizer_class": "LlamaTokenizer", **NAMES}
    chatml = {**llama, "eos_token": STOP, "added_tokens_decoder": {**_decoder(0, *NAMES), **_decoder(340, STOP, START)}}
    chatml["added_tokens_decoder"] |= _decoder(0, "<unk>", "<s>", "</s>")
    gemma = {"tokenizer_class": "GemmaTokenizer", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    sized = pieces(
        **IDENTITY, add_dummy_prefix=False, pad_id=0, eos_id=1, bos_id=2, unk_id=3,
        pad_piece="<pad>", eos_piece="<eos>", bos_piece="<bos>", user_defined_symbols="<start_of_turn>",
    )  # fmt: skip
    return {
        "of 2023": _spm(plain, add_bos_token=True, **llama),
        "of 2023, old tokens": _spm(plain, add_bos_token=True, **{**llama, "bos_token": _old("<s>")}),
        "says nothing": _spm(plain),
        "class alone": _spm(plain, tokenizer_class="LlamaTokenizer"),
        "map": _spm(plain, map_=NAMES, tokenizer_class="LlamaTokenizer"),
        "map of objects": _spm(plain, map_={key: {"content": v, **PLAIN} for key, v in NAMES.items()}, **llama),
        "both ends": _spm(plain, add_bos_token=True, add_eos_token=True, **llama),
        "chatml": _spm(plain, added=chat, add_bos_token=True, **chatml),
        "chatml, added alone": _spm(plain, added=chat, **llama),
        "chatml, listed": _spm(plain, added=chat, map_={"additional_special_tokens": [START]}, **llama),
        "legacy": _spm(plain, added=chat, legacy=True, **llama),
        "legacy is null": _spm(plain, added=chat, legacy=None, **llama),
        "no space in front": _spm(plain, add_prefix_space=False, **llama),
        "usual normalisation": _spm(usual, add_bos_token=True, **llama),
        "symbols": _spm(own, add_bos_token=True, **llama),
        "symbols without a class": _spm(own),
        "padding token": _spm(plain, pad_token="<pad>", **llama),
        "unigram": _spm(pieces("unigram"), **llama),
        "unigram without a class": _spm(pieces("unigram")),
        "mistral": _spm(plain, "mistral", add_bos_token=True, **llama),
        "mixtral, usual normalisation": _spm(usual, "mixtral", add_bos_token=True),
        "code llama": _spm(plain, **{**llama, "tokenizer_class": "CodeLlamaTokenizer"}),
        "gemma": _spm(sized, "gemma", add_bos_token=True, **gemma),
        "gemma without a class": _spm(sized, "gemma2"),
        "nemotron": _spm(plain, "nemotron", tokenizer_class="LlamaTokenizer"),
    }


def of_descriptions() -> dict[str, Directory]:
    """``tokenizer.json``, with what else is said of it elsewhere."""
    fast, spm, chat = "PreTrainedTokenizerFast", _described("pieces"), _described("pieces", STOP, START)
    letters = _described("bytes", START, STOP)
    think = AddedToken("<think>", special=False, normalized=False)
    return {
        "as it is": _file(letters, tokenizer_class=fast, eos_token=STOP),
        "bytes that say Llama": _file(letters, tokenizer_class="LlamaTokenizerFast", eos_token=STOP),
        "gpt2": _file(letters, "gpt2", tokenizer_class="GPT2Tokenizer"),
        "qwen2": _file(_described("bytes", START, STOP, think), "qwen2", tokenizer_class="Qwen2TokenizerFast"),
        "gpt_neox": _file(letters, "gpt_neox", tokenizer_class="GPTNeoXTokenizerFast", add_bos_token=True),
        "pieces as they are": _file(chat, tokenizer_class=fast, **NAMES),
        "llama 2": _file(spm, tokenizer_class="LlamaTokenizer", legacy=False, **NAMES),
        "tinyllama": _file(chat, tokenizer_class="LlamaTokenizer", legacy=True, **{**NAMES, "eos_token": STOP}),
        "mistral": _file(chat, "mistral", tokenizer_class="LlamaTokenizer", **NAMES),
        "tokens beyond it": _file(spm, tokenizer_class=fast, added_tokens_decoder=_decoder(340, STOP, START), **NAMES),
        "tokens in added_tokens.json": _file(letters, "gpt2", tokenizer_class=fast, added={"<tool>": 332}),
        "names alone": _file(letters, tokenizer_class=fast, bos_token="<|begin|>", eos_token=STOP),
        "map": _file(letters, "bloom", map_={"bos_token": START, "eos_token": STOP, "pad_token": "<pad>"}),
        "padding": _file(_described("bytes", STOP, padding=STOP), "gpt_bigcode", tokenizer_class=fast),
    }


def chat_tokenizer(folder: Path, template: str) -> Any:
    """A byte-level tokenizer with special tokens and a template, as transformers saves it."""
    import tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    pipeline = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    pipeline.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = tokenizers.decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=pipeline, bos_token="<s>", eos_token="</s>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )  # fmt: skip
    fast.chat_template = template
    fast.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)
