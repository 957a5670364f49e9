"""Score a GPT ``.nemo`` on LAMBADA with plain Hugging Face code: the oracle for what a deployment must reach.

    python3 examples/score_with_huggingface.py --checkpoint=gpt3_demo.nemo --data=lambada_test.jsonl

Prints the figures as JSON, computed in fp32 on the CPU with transformers' GPT2LMHeadModel; ``--card`` also records
them, and the first 20 texts' own scores, in a model card, by the name of the data file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import torch
from huggingface_gpt import load_nemo
from transformers import GPT2LMHeadModel, GPT2TokenizerFast

Ids = tuple[int, ...]
Case = tuple[Ids, Ids]  # context, target
RECORDED_SAMPLES = 20
LONGEST_GRAM = 4
_ASCII = str.maketrans("\u201c\u201d\u2018\u2019", "\"\"''")


def split_cases(text: str, tokenizer: GPT2TokenizerFast) -> dict[str, Case]:
    """Return context and target for each of the metrics, as their own evaluation scripts cut them."""

    def encode(part: str) -> Ids:
        return tuple(tokenizer(part)["input_ids"])

    whole = encode(text)  # FasterTransformer backend: the last token
    word = text.split()[-1]  # FasterTransformer's example: the last word, encoded on its own
    context, _, last = text.rpartition(" ")  # lm-eval: split at the last space, encoded jointly
    continuation = context[len(context.rstrip()) :] + " " + last
    context_ids = encode(context.rstrip())
    plain = "\n" + context.translate(_ASCII).strip()  # NeMo-Megatron-Launcher's harness
    plain_ids = encode(plain)
    return {
        "last_token": (whole[:-1], whole[-1:]),
        "last_word": (encode(text.rstrip()[: -len(word)].strip()), encode(f" {word}")),
        "openai": (context_ids, encode(context.rstrip() + continuation)[len(context_ids) :]),
        "nemo": (plain_ids, encode(f"{plain} {last.translate(_ASCII)}")[len(plain_ids) :]),
    }


@torch.no_grad()
def score_targets(model: GPT2LMHeadModel, cases: set[Case], batch: int = 16) -> dict[Case, tuple[bool, float]]:
    """For each case: are all target tokens the most probable ones, and the target's log probability."""
    scores: dict[Case, tuple[bool, float]] = {}
    ordered = sorted(cases, key=lambda case: (len(case[0]) + len(case[1]), case))
    for start in range(0, len(ordered), batch):
        part = ordered[start : start + batch]
        rows = [torch.tensor(context + target) for context, target in part]
        # Padding on the right: a causal model does not see it from the left.
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        hidden = model.transformer(padded).last_hidden_state
        for row, (context, target) in zip(hidden, part, strict=True):
            log_probs = model.lm_head(row[len(context) - 1 : len(context) + len(target) - 1]).log_softmax(dim=-1)
            labels = torch.tensor(target)
            hit = bool((log_probs.argmax(dim=-1) == labels).all())
            scores[context, target] = hit, log_probs.gather(1, labels[:, None]).sum().item()
    return scores


@torch.no_grad()
def count_grams(model: GPT2LMHeadModel, texts: list[Ids], batch: int = 16) -> dict[str, float]:
    """Share of all runs of 1 to 4 tokens that greedy generation gives after what precedes them."""
    hits, places = [0] * LONGEST_GRAM, [0] * LONGEST_GRAM
    ordered = sorted(texts, key=len)
    for start in range(0, len(ordered), batch):
        part = ordered[start : start + batch]
        padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in part], batch_first=True)
        best = model(padded).logits.argmax(dim=-1)
        for row, ids in zip(best, part, strict=True):
            right = (row[: len(ids) - 1] == torch.tensor(ids[1:])).tolist()
            for length in range(1, LONGEST_GRAM + 1):
                runs = [all(right[place : place + length]) for place in range(len(right) - length + 1)]
                hits[length - 1] += sum(runs)
                places[length - 1] += len(runs)
    return {f"{n}-gram_accuracy": hit / place for n, (hit, place) in enumerate(zip(hits, places, strict=True), 1)}


def score_texts(model: GPT2LMHeadModel, tokenizer: GPT2TokenizerFast, texts: list[str]) -> list[dict[str, Any]]:
    """Score texts by every metric: whether each one's target is hit, and two targets' log probabilities."""
    splits = [split_cases(text, tokenizer) for text in texts]
    scores = score_targets(model, {case for split in splits for case in split.values()})
    return [
        {f"{name}_hit": scores[case][0] for name, case in split.items()}
        | {f"{name}_log_prob": scores[split[name]][1] for name in ("openai", "nemo")}
        for split in splits
    ]


def summarise(samples: list[dict[str, Any]]) -> dict[str, float | int]:
    """Return the figures by name; accuracies as fractions, the perplexity per word."""
    count = len(samples)
    return {
        "n": count,
        "last_token_accuracy": sum(sample["last_token_hit"] for sample in samples) / count,
        "last_word_accuracy_greedy": sum(sample["last_word_hit"] for sample in samples) / count,
        "lambada_openai_accuracy": sum(sample["openai_hit"] for sample in samples) / count,
        "lambada_openai_perplexity": math.exp(-sum(sample["openai_log_prob"] for sample in samples) / count),
        "nemo_harness_accuracy": sum(sample["nemo_hit"] for sample in samples) / count,
        "nemo_harness_perplexity": math.exp(-sum(sample["nemo_log_prob"] for sample in samples) / count),
    }


def read_texts(path: Path) -> list[str]:
    """Read the ``text`` of every line of a JSON Lines file."""
    return [json.loads(line)["text"] for line in path.read_text("utf-8").split("\n") if line]


def record_figures(card: Path, data: Path, figures: dict[str, Any], samples: list[dict[str, Any]]) -> None:
    """Put the figures of one data file into a model card, beside what it already holds."""
    content = json.loads(card.read_text("utf-8")) if card.exists() else {}
    content.setdefault("lambada", {})[data.name] = {
        "sha256": hashlib.sha256(data.read_bytes()).hexdigest(),
        **figures,
        "first_samples": samples[:RECORDED_SAMPLES],
    }
    card.write_text(json.dumps(content, indent=1) + "\n", "utf-8")


def main() -> None:
    """Score one file, print the figures and record them if there is a card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="legacy NeMo .nemo archive")
    parser.add_argument("--data", type=Path, required=True, help="LAMBADA as JSON Lines with a 'text'")
    parser.add_argument("--card", type=Path, help="model_card.json to record the figures in")
    arguments = parser.parse_args()
    model, tokenizer = load_nemo(arguments.checkpoint)
    texts = read_texts(arguments.data)
    samples = score_texts(model, tokenizer, texts)
    figures = summarise(samples) | count_grams(model, [tuple(tokenizer(text)["input_ids"]) for text in texts])
    print(json.dumps(figures, indent=1))
    if arguments.card:
        record_figures(arguments.card, arguments.data, figures, samples)


if __name__ == "__main__":
    main()
