"""A tiny Hugging Face GPT-2 that knows half of some LAMBADA texts by heart, and what LAMBADA's figures are for it.

The figures come from teacher-forced log probabilities over whole texts, which no part of the evaluation computes.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import GPT2Config, GPT2LMHeadModel, GPT2TokenizerFast

SUBSET = Path(__file__).resolve().parents[3] / "examples" / "data" / "lambada_subset.jsonl"
torch.set_num_threads(1)  # matrices this small only lose time to a second thread
POSITIONS = 64
LEARNT = 6


def subset_texts(count: int) -> list[str]:
    lines = SUBSET.read_text(encoding="utf-8").splitlines()[:count]
    return [json.loads(line)["text"] for line in lines]


def short_texts() -> list[str]:
    """The last sentences of some texts, with a last word after a line break and curly quotes among them."""
    texts = [" ".join(text.split(" ")[-12:]) for text in subset_texts(11)]
    return ["It certainly was some kind of\n\nPower", *texts]


def straighten(text: str) -> str:
    for curly, plain in (("\u201c", '"'), ("\u201d", '"'), ("\u2018", "'"), ("\u2019", "'")):
        text = text.replace(curly, plain)
    return text


class LearntModel:
    """The model, and its tokenizer files and config.ini in one directory."""

    def __init__(self, directory: Path) -> None:
        torch.manual_seed(7)
        trained = ByteLevelBPETokenizer()
        trained.train_from_iterator(subset_texts(60), vocab_size=400, show_progress=False)
        trained.save_model(str(directory))
        self.directory = directory
        self.tokenizer = GPT2TokenizerFast(vocab=str(directory / "vocab.json"), merges=str(directory / "merges.txt"))
        (directory / "config.ini").write_text(f"[gpt]\nvocab_size = 400\nmax_pos_seq_len = {POSITIONS}\n")
        config = GPT2Config(
            vocab_size=400, n_positions=POSITIONS, n_embd=48, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
        )
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        self.model = GPT2LMHeadModel(config)
        learnt = short_texts()[:LEARNT]  # a few of them at the start of a line too, with straight quotes
        learnt += ["\n" + straighten(text) for text in learnt[1:4]]
        self._learn([self.encode(text)[-POSITIONS:] for text in learnt])
        self.model.eval()
        self._known = functools.lru_cache(512)(self._log_probs)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def log_probs(self, ids: list[int]) -> torch.Tensor:
        """[len(ids), vocabulary]: of the token after each position; many tests ask for the same."""
        return self._known(tuple(ids))

    def _log_probs(self, ids: tuple[int, ...]) -> torch.Tensor:
        with torch.no_grad():
            logits = self.model(torch.tensor([ids])).logits[0]
        return torch.log_softmax(logits.double(), dim=-1)

    def _learn(self, texts: list[list[int]]) -> None:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
        counts = torch.tensor([[len(text) - 1] for text in texts])
        is_text = torch.arange(ids.shape[1] - 1) < counts
        for _ in range(40):
            logits = self.model(ids).logits[:, :-1]
            losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
            (losses * is_text / counts).sum().backward()  # the sum of each text's mean
            optimizer.step()
            optimizer.zero_grad()


def expected_figures(model: LearntModel, texts: list[str]) -> dict[str, list[float]]:
    """Per text, by the definitions of the metrics' sources and Hugging Face's log probabilities alone."""
    figures: dict[str, list[float]] = {
        "token": [],
        "word": [],
        "openai": [],
        "log_prob": [],
        "nemo": [],
        "nemo_log_prob": [],
    }
    for text in texts:
        whole = model.encode(text)
        figures["token"].append(float(model.log_probs(whole[:-1])[-1].argmax() == whole[-1]))
        context_text, _, word = text.rpartition(" ")
        context = model.encode(context_text)
        log_probs = model.log_probs(whole)
        steps = [(log_probs[at - 1], whole[at]) for at in range(len(context), len(whole))]
        figures["openai"].append(float(all(int(step.argmax()) == token for step, token in steps)))
        figures["log_prob"].append(sum(float(step[token]) for step, token in steps))
        straight = straighten(text)
        given_text = "\n" + straight.rsplit(" ", 1)[0].strip()
        label = model.encode(given_text + " " + straight.rsplit(" ", 1)[1])[len(model.encode(given_text)) :]
        rows = model.log_probs(model.encode(given_text) + label)[-len(label) - 1 : -1]
        figures["nemo"].append(float(rows.argmax(-1).tolist() == label))
        figures["nemo_log_prob"].append(sum(float(row[token]) for row, token in zip(rows, label, strict=True)))
        last = text.split()[-1]
        label, given = model.encode(" " + last), model.encode(text[: -len(last)].strip())
        forced = model.log_probs(given + label)
        hits = [int(forced[len(given) - 1 + at].argmax()) == token for at, token in enumerate(label)]
        figures["word"].append(float(all(hits)))
    return figures
