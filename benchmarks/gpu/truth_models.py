"""Models of every family with random weights, made by transformers: the oracle of benchmarks.gpu.truth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .truth_families import Shape, keys_of
from .truth_predictors import HEADED, PREDICTING, add_predictor, weaken_layers, write_head

_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
_LETTERS = range(ord("a"), ord("z") + 1)
HEAD = "head"


def save_model(name: str, shape: Shape, directory: Path) -> Any:
    """Make a family's model in fp32, save it, and return it; its EAGLE-3 head lies beside the directory as HEAD."""
    import transformers

    kind, keys = keys_of(name, shape)
    torch.manual_seed(len(name) + shape.hidden)
    scale = {} if kind == "T5" else {"initializer_range": 0.04 * (1024 / shape.hidden) ** 0.5}
    config = getattr(transformers, f"{kind}Config")(vocab_size=shape.vocab, **scale, **keys)
    has_encoder = config.is_encoder_decoder
    auto = transformers.AutoModelForSeq2SeqLM if has_encoder else transformers.AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation="eager").float().eval()
    if has_encoder and not config.tie_word_embeddings:  # else one token had all of the probability
        model.lm_head.weight.data /= shape.hidden**0.5 / 2
    _draw_the_rest(model, config)
    if name.endswith((PREDICTING, HEADED)):
        weaken_layers(model)
    model.save_pretrained(directory)
    if name.endswith(PREDICTING):
        add_predictor(config, directory)
    if name.endswith(HEADED):
        write_head(config, model.get_input_embeddings().weight, model.lm_head.weight, directory.parent / HEAD)
    return model


def _draw_the_rest(model: Any, config: Any) -> None:
    """Draw what some releases of transformers leave at zero, so that nothing ties; raise gates to a limit they have."""
    for name, numbers in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("correction_bias"):
            numbers.data.normal_(std=0.1)
        elif name.endswith((".gate.weight", ".router.weight")):
            numbers.data.normal_(std=config.initializer_range)
        elif config.model_type == "gpt_oss" and name.endswith("gate_up_proj"):
            numbers.data *= 3  # one in thirty is beyond 7, which not every release reads from the configuration


def write_vocabulary(vocab: int, directory: Path) -> None:
    """Write a byte-level vocabulary beside shards: the 256 bytes, and behind them texts of letters and digits."""
    rest = [byte for byte in range(256) if byte not in _PRINTED]
    names = {byte: chr(byte) for byte in _PRINTED} | {byte: chr(256 + place) for place, byte in enumerate(rest)}
    texts = [names[byte] for byte in range(256)] + [_text_of(token) for token in range(256, vocab)]
    (directory / "vocab.json").write_text(json.dumps({text: token for token, text in enumerate(texts)}))
    (directory / "merges.txt").write_text("#version: 0.2\n")


def _text_of(token: int) -> str:
    """Give the text of a token of several letters; those of every second one are letters alone."""
    letters = ""
    rest = token
    while rest:
        rest, letter = divmod(rest, 26)
        letters += chr(_LETTERS[letter])
    return f"q{letters}" if token % 2 else f"q{letters}7"


def tokens_of_letters(vocab: int) -> Tensor:
    """Say of each token whether it is of the letters a to z alone, bool [V]."""
    token = torch.arange(vocab)
    is_letter = (token >= _LETTERS.start) & (token < _LETTERS.stop)
    return is_letter | ((token >= 256) & (token % 2 == 1))
