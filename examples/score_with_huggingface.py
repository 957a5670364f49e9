"""Score a demonstration checkpoint on LAMBADA with plain Hugging Face code: the oracle of what a deployment reaches.

    python3 examples/score_with_huggingface.py --checkpoint=gpt3_demo.nemo --data=lambada_test.jsonl

Prints the figures as JSON, computed in fp32 on the CPU with transformers' model of the family, each distinct text in
one forward pass; ``--card`` also records them, and the first 20 texts' own scores, in a model card, by the name of the
data file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import torch
from huggingface_models import load, merge
from tqdm import tqdm
from transformers import GPT2TokenizerFast, PreTrainedModel

Ids = tuple[int, ...]
Case = tuple[Ids, Ids]  # context, target
Judged = tuple[list[bool], list[float]]  # hits, log probabilities
BATCH_TOKENS = 1024  # padding included: on two cores larger batches are slower
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
def judge_sequences(model: PreTrainedModel, sequences: set[Ids]) -> dict[Ids, Judged]:
    """Judge each sequence's tokens from the second on in one pass: is each the most probable, its log probability.

    Sequences of like length share a batch, padded on the right: a causal model does not see that from the left.
    """
    judged: dict[Ids, Judged] = {}
    ordered = sorted(sequences, key=lambda ids: (-len(ids), ids))
    with tqdm(total=sum(map(len, ordered)), unit="tok", unit_scale=True, disable=None) as progress:
        while ordered:
            part = ordered[: max(1, BATCH_TOKENS // len(ordered[0]))]
            ordered = ordered[len(part) :]
            padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in part], batch_first=True)
            for ids, row in zip(part, model(padded).logits, strict=True):
                rows, labels = row[: len(ids) - 1], torch.tensor(ids[1:])
                log_probs = rows.gather(1, labels[:, None])[:, 0] - rows.logsumexp(dim=-1)
                judged[ids] = (rows.argmax(dim=-1) == labels).tolist(), log_probs.tolist()
            progress.update(sum(map(len, part)))
    return judged


def gram_accuracies(texts: list[list[bool]]) -> dict[str, float]:
    """Share of all runs of 1 to 4 tokens that greedy generation gives after what precedes them, of each text's hits."""
    figures = {}
    for length in range(1, LONGEST_GRAM + 1):
        runs = [all(hits[place : place + length]) for hits in texts for place in range(len(hits) - length + 1)]
        figures[f"{length}-gram_accuracy"] = sum(runs) / len(runs)
    return figures


def score_texts(
    model: PreTrainedModel, tokenizer: GPT2TokenizerFast, texts: list[str]
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Score texts by every metric: is each target hit, two targets' log probabilities; and k-grams."""
    splits = [split_cases(text, tokenizer) for text in texts]
    judged = judge_sequences(model, {context + target for split in splits for context, target in split.values()})

    def score(case: Case) -> tuple[bool, float]:
        hits, log_probs = (values[len(case[0]) - 1 :] for values in judged[case[0] + case[1]])
        return all(hits), math.fsum(log_probs)

    samples = [
        {f"{name}_hit": score(case)[0] for name, case in split.items()}
        | {f"{name}_log_prob": score(split[name])[1] for name in ("openai", "nemo")}
        for split in splits
    ]
    whole = [context + target for context, target in (split["last_token"] for split in splits)]
    return samples, gram_accuracies([judged[ids][0] for ids in whole])


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


def record_figures(
    card: Path, adapter: str, data: Path, figures: dict[str, Any], samples: list[dict[str, Any]]
) -> None:
    """Put the figures of one data file into a model card, beside what it already holds; an adapter's by its name."""
    content = json.loads(card.read_text("utf-8")) if card.exists() else {}
    own = content.setdefault("adapters", {}).setdefault(adapter, {}) if adapter else content
    own.setdefault("lambada", {})[data.name] = {
        "sha256": hashlib.sha256(data.read_bytes()).hexdigest(),
        **figures,
        "first_samples": samples[:RECORDED_SAMPLES],
    }
    card.write_text(json.dumps(content, indent=1) + "\n", "utf-8")


def main() -> None:
    """Score one file, print the figures and record them if there is a card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="NeMo archive, or Megatron-LM's directory")
    parser.add_argument("--adapter", type=Path, help="a LoRA of PEFT's, to be merged into it")
    parser.add_argument("--data", type=Path, required=True, help="LAMBADA as JSON Lines with a 'text'")
    parser.add_argument("--card", type=Path, help="model_card.json to record the figures in")
    arguments = parser.parse_args()
    model, tokenizer = load(arguments.checkpoint)
    if arguments.adapter:
        merge(model, arguments.adapter)
    texts = read_texts(arguments.data)
    samples, grams = score_texts(model, tokenizer, texts)
    figures = summarise(samples) | grams
    print(json.dumps(figures, indent=1))
    if arguments.card:
        name = arguments.adapter.name if arguments.adapter else ""
        record_figures(arguments.card, name, arguments.data, figures, samples)


if __name__ == "__main__":
    main()
