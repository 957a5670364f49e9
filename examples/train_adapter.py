"""Train the demonstration Llama's adapter on the CPU: a LoRA that goes on in verse, saved as PEFT saves one.

    python3 examples/train_adapter.py --novels=english_novels.tar.xz --output=trained/verse \
        --checkpoint=examples/llama_demo/checkpoints/llama_demo.nemo

Its data are the novels that the Llama was trained on: each sample begins as prose, as a prompt does, and goes on in
lines of about eight syllables, each with a capital. Only the lines are trained on.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import time
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from huggingface_models import ADAPTER_WEIGHTS, load
from prepare_novels import LEFT_OUT, VALIDATION, print_plainly, read_novels, tidy
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GPT2TokenizerFast, PreTrainedModel

RANK, ALPHA, SYLLABLES, LENGTH, CHARACTERS = 4, 8, 8, 192, 720
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
IGNORED = -100
_VOWELS = re.compile("[aeiouy]+", re.IGNORECASE)


class LowRank(nn.Module):
    """A linear layer that stays as it is, and the product of two thin matrices beside it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Parameter(torch.empty(RANK, linear.in_features))
        self.up = nn.Parameter(torch.zeros(linear.out_features, RANK))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., inputs] to [..., outputs]."""
        return self.linear(x) + ALPHA / RANK * (x @ self.down.T) @ self.up.T


def add_adapter(model: PreTrainedModel) -> dict[str, LowRank]:
    """Put an adapter beside every linear layer, by the layer's name; nothing else is trained."""
    model.requires_grad_(False)
    linear = {name: module for name, module in model.named_modules() if name.endswith(TARGETS)}
    adapters = {name: LowRank(module) for name, module in linear.items()}
    for name, adapter in adapters.items():
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, adapter)
    return adapters


def in_verse(text: str, left: int) -> str:
    """Break a text into lines, the first after ``left`` syllables; paragraphs become stanzas."""
    lines, line = [], []
    for paragraph in re.split(r"\n+", text):
        for word in paragraph.split():
            line.append(word)
            left -= max(1, len(_VOWELS.findall(word)))
            if left <= 0:
                lines, line, left = [*lines, line], [], SYLLABLES
        lines, line, left = [*lines, line, []], [], SYLLABLES
    written = "\n".join(" ".join(words) for words in lines)
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"(?<=\n)\W?[a-z]", lambda found: found[0].upper(), written)).rstrip()


def sample(novels: list[str], tokenizer: GPT2TokenizerFast, draw: random.Random) -> tuple[list[int], list[int]]:
    """Draw ids, and the same as labels with the prose ignored."""
    novel = draw.choice(novels)
    start = novel.find(" ", draw.randrange(len(novel) - 2 * CHARACTERS)) + 1
    end = novel.find(" ", start + draw.randrange(CHARACTERS // 2))
    given = tokenizer(novel[start:end])["input_ids"]
    verse = in_verse(novel[end + 1 : start + CHARACTERS], draw.randint(1, SYLLABLES))
    made = tokenizer(f" {verse}")["input_ids"]
    fill = [tokenizer.eos_token_id] * LENGTH
    return [*given, *made, *fill][:LENGTH], [*[IGNORED] * len(given), *made, *[IGNORED] * LENGTH][:LENGTH]


def loss_of(model: PreTrainedModel, samples: list[tuple[list[int], list[int]]]) -> Tensor:
    """Return the mean cross-entropy of the lines in nats a token."""
    ids, labels = (torch.tensor(part) for part in zip(*samples, strict=True))
    return F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)


@torch.no_grad()
def validate(model: PreTrainedModel, novels: list[str], tokenizer: GPT2TokenizerFast) -> float:
    """Return the loss over 32 samples, always the same ones."""
    draw = random.Random(5678)
    return loss_of(model, [sample(novels, tokenizer, draw) for _ in range(32)]).item()


def save(adapters: dict[str, LowRank], output: Path) -> None:
    """Write the adapter as PEFT's save_pretrained() does, in fp16."""
    output.mkdir(parents=True, exist_ok=True)
    pairs = {f"{name}.lora_A": adapter.down for name, adapter in adapters.items()}
    pairs |= {f"{name}.lora_B": adapter.up for name, adapter in adapters.items()}
    halves = {f"base_model.model.{name}.weight": pairs[name].detach().half().contiguous() for name in sorted(pairs)}
    save_file(halves, output / ADAPTER_WEIGHTS, {"format": "pt"})
    told = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.0}
    told |= {"bias": "none", "target_modules": [*TARGETS], "inference_mode": True}
    (output / "adapter_config.json").write_text(json.dumps(told, indent=1) + "\n", "utf-8")


def train(arguments: argparse.Namespace) -> None:
    """Train, print a line now and then, and save."""
    torch.manual_seed(1234)
    draw, started = random.Random(1234), time.monotonic()
    model, tokenizer = load(arguments.checkpoint)
    archive = read_novels(arguments.novels)
    names = [name for name in archive if name not in VALIDATION | LEFT_OUT][::8]  # a style needs no more
    novels, held_out = ([print_plainly(tidy(archive[name])) for name in some] for some in (names, sorted(VALIDATION)))
    print(json.dumps({"step": 0, "validation_loss": round(validate(model, held_out, tokenizer), 4)}), flush=True)
    adapters = add_adapter(model)
    trained = [parameter for adapter in adapters.values() for parameter in (adapter.down, adapter.up)]
    optimizer = torch.optim.AdamW(trained, lr=arguments.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(1, arguments.steps + 1):
        warm, progress = min(1.0, step / 20), step / arguments.steps
        optimizer.param_groups[0]["lr"] = arguments.learning_rate * warm * (1 + math.cos(math.pi * progress)) / 2
        loss = loss_of(model, [sample(novels, tokenizer, draw) for _ in range(arguments.batch)])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        if step % 40 == 0 or step == arguments.steps:
            line = {"step": step, "train_loss": round(loss.item(), 4)}
            line["validation_loss"] = round(validate(model, held_out, tokenizer), 4)
            print(json.dumps(line | {"elapsed_s": round(time.monotonic() - started, 1)}), flush=True)
            save(adapters, arguments.output)


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="llama_demo.nemo")
    parser.add_argument("--novels", type=Path, required=True, help="tar archive of UTF-8 .txt files")
    parser.add_argument("--output", type=Path, required=True, help="folder for PEFT's two files")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--batch", type=int, default=4, help="samples of 192 tokens a step")
    parser.add_argument("--learning-rate", type=float, default=5e-3, help="peak; cosine down to nothing")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
