"""Train a demonstration checkpoint in plain torch: a small GPT, saved as NeMo's legacy ``.nemo``, a Llama or a mixture.

    python3 examples/prepare_novels.py --novels=english_novels.tar.xz --output=prepared
    python3 examples/train_demo.py --prepared=prepared --output=trained
    python3 examples/train_demo.py --prepared=prepared --output=trained --model=llama_demo
    python3 examples/train_demo.py --prepared=prepared --output=trained --model=moe_demo --batch=8 --steps=1500

The modules carry the names that NeMo gives them, so that a state dict needs only the prefix ``model.``: those of its
legacy GPT, and for the Llama those of megatron-core with Transformer Engine, whose products begin with a norm. The
mixture has megatron-core's too, and is saved as Megatron-LM saves a distributed checkpoint (torch_dist).
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import math
import re
import shutil
import tarfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F  # noqa: N812 - the usual name
import yaml
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
EPSILON, ROTARY_BASE = 1e-5, 10000.0
BALANCE = 0.01  # what the experts' uneven use counts beside the cross-entropy


@dataclass(frozen=True)
class Dims:
    """Dimensions of a model; the vocabulary is padded as NeMo pads it.

    ``groups``: heads of keys and values. ``experts``, ``used``: of a mixture's layer, and those that a token uses.
    """

    vocabulary_size: int
    layers: int = 6
    hidden: int = 256
    heads: int = 8
    groups: int = 8
    inner: int = 1024
    positions: int = 512
    experts: int = 0
    used: int = 0

    @property
    def padded_vocabulary(self) -> int:
        """Rows of the embedding: the next multiple of 128 (make_vocab_size_divisible_by)."""
        return -(-self.vocabulary_size // 128) * 128


class SelfAttention(nn.Module):
    """Causal attention; the rows of query_key_value are [heads, (query, key, value), head size]."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.heads = dims.heads
        self.query_key_value = nn.Linear(dims.hidden, 3 * dims.hidden)
        self.dense = nn.Linear(dims.hidden, dims.hidden)
        # A bias of the keys moves all scores of a query alike, so softmax undoes it and its gradient is nothing
        # but rounding: Adam would still walk it off at full speed, until bf16 scores drown in it. It stays zero.
        trained = torch.tensor([1.0, 0.0, 1.0]).view(1, 3, 1).expand(dims.heads, 3, dims.hidden // dims.heads)
        self.register_buffer("trained_bias", trained.flatten(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, length, hidden] to the same shape."""
        batch, length, hidden = x.shape
        bias = self.query_key_value.bias * self.trained_bias
        mixed = F.linear(x, self.query_key_value.weight, bias).view(batch, length, self.heads, 3, hidden // self.heads)
        query, key, value = (part.squeeze(3).transpose(1, 2) for part in mixed.split(1, dim=3))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.dense(attended.transpose(1, 2).reshape(batch, length, hidden))


class Mlp(nn.Module):
    """Two linear maps with the tanh form of GELU in between."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(dims.hidden, dims.inner)
        self.dense_4h_to_h = nn.Linear(dims.inner, dims.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, length, hidden] to the same shape."""
        return self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(x), approximate="tanh"))


class Layer(nn.Module):
    """A pre-LN transformer layer."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(dims.hidden)
        self.self_attention = SelfAttention(dims)
        self.post_attention_layernorm = nn.LayerNorm(dims.hidden)
        self.mlp = Mlp(dims)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, length, hidden] to the same shape."""
        x = x + self.self_attention(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Gpt(nn.Module):
    """A GPT with learned positions and the output tied to the word embeddings."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        embedding = {
            "word_embeddings": nn.Embedding(dims.padded_vocabulary, dims.hidden),
            "position_embeddings": nn.Embedding(dims.positions, dims.hidden),
        }
        encoder = {
            "layers": nn.ModuleList(Layer(dims) for _ in range(dims.layers)),
            "final_layernorm": nn.LayerNorm(dims.hidden),
        }
        self.language_model = nn.ModuleDict({"embedding": nn.ModuleDict(embedding), "encoder": nn.ModuleDict(encoder)})
        initialize(self, ("dense.weight", "dense_4h_to_h.weight"), dims.layers)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [batch, length, padded vocabulary] for ids [batch, length]."""
        embedding, encoder = self.language_model["embedding"], self.language_model["encoder"]
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = embedding["word_embeddings"](ids) + embedding["position_embeddings"](positions)
        for layer in encoder["layers"]:
            x = layer(x)
        return F.linear(encoder["final_layernorm"](x), embedding["word_embeddings"].weight)


class NormedLinear(nn.Module):
    """An RMS norm and a linear map without a bias behind it, as Transformer Engine's LayerNormLinear."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer_norm_weight = nn.Parameter(torch.ones(inputs))
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., inputs] to [..., outputs]."""
        return F.linear(F.rms_norm(x, x.shape[-1:], self.layer_norm_weight, EPSILON), self.weight)


def rotate(x: Tensor) -> Tensor:
    """Rotate [batch, heads, length, size] by position, a head's first half against its second (RoPE)."""
    length, size = x.shape[-2:]
    waves = ROTARY_BASE ** (-torch.arange(0, size, 2, device=x.device) / size)
    angles = torch.arange(length, device=x.device)[:, None] * waves
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class GroupedAttention(nn.Module):
    """Causal attention; the rows of linear_qkv are [groups, (a group's queries, key, value), head size]."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.groups, self.size = dims.groups, dims.hidden // dims.heads
        self.linear_qkv = NormedLinear(dims.hidden, dims.hidden + 2 * dims.groups * self.size)
        self.linear_proj = nn.Linear(dims.hidden, dims.hidden, bias=False)
        if dims.experts:  # as in Qwen3's mixtures
            self.q_layernorm, self.k_layernorm = (nn.RMSNorm(self.size, EPSILON) for _ in range(2))
        else:
            self.q_layernorm = self.k_layernorm = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, length, hidden] to the same shape."""
        mixed = self.linear_qkv(x).unflatten(-1, (self.groups, -1, self.size))  # [batch, length, groups, n + 2, size]
        parts = mixed.split((mixed.shape[3] - 2, 1, 1), dim=3)
        query, key, value = (part.flatten(2, 3).transpose(1, 2) for part in parts)
        query, key = self.q_layernorm(query).to(value.dtype), self.k_layernorm(key).to(value.dtype)
        attended = F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True, enable_gqa=True)
        return self.linear_proj(attended.transpose(1, 2).flatten(2))


class SwiGlu(nn.Module):
    """silu(gate) * up and a linear map; linear_fc1 is [gate; up]."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.linear_fc1 = NormedLinear(dims.hidden, 2 * dims.inner)
        self.linear_fc2 = nn.Linear(dims.inner, dims.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, length, hidden] to the same shape."""
        gate, up = self.linear_fc1(x).chunk(2, dim=-1)
        return self.linear_fc2(F.silu(gate) * up)


class LlamaLayer(nn.Module):
    """A transformer layer of a Llama; the norms are in the products."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.self_attention = GroupedAttention(dims)
        self.mlp = SwiGlu(dims)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, length, hidden] to the same shape."""
        x = x + self.self_attention(x)
        return x + self.mlp(x)


class Matrices(nn.Module):
    """One matrix of each expert: [experts, outputs, inputs]."""

    def __init__(self, experts: int, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))


class Mixture(nn.Module):
    """Experts, each a SwiGLU, of which a router chooses some for each token; the rows of linear_fc1 are [gate; up]."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.used = dims.used
        self.router = nn.Linear(dims.hidden, dims.experts, bias=False)
        matrices = {
            "linear_fc1": Matrices(dims.experts, 2 * dims.inner, dims.hidden),
            "linear_fc2": Matrices(dims.experts, dims.hidden, dims.inner),
        }
        self.experts = nn.ModuleDict(matrices)
        self.unevenness = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, length, hidden] to the same shape; note how unevenly the experts are used, at least 1."""
        rows = x.flatten(0, 1)
        scores = F.linear(rows.float(), self.router.weight).float().softmax(-1)
        shares, chosen = scores.topk(self.used)
        shares = shares / shares.sum(-1, keepdim=True)
        counts = F.one_hot(chosen, scores.shape[1]).float().mean((0, 1))
        self.unevenness = scores.shape[1] * (scores.mean(0) * counts).sum()
        result = torch.zeros_like(rows, dtype=torch.float32)
        matrices = zip(*(self.experts[name].weight.unbind() for name in ("linear_fc1", "linear_fc2")), strict=True)
        for expert, (into, out) in enumerate(matrices):
            row, place = (chosen == expert).nonzero(as_tuple=True)
            gate, up = F.linear(rows[row], into).chunk(2, dim=-1)
            made = F.linear(F.silu(gate) * up, out)
            result = result.index_add(0, row, made * shares[row, place, None])
        return result.view(x.shape)


class MixtureLayer(nn.Module):
    """A transformer layer of one of Qwen3's mixtures; the norm before the experts is by itself."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.self_attention = GroupedAttention(dims)
        self.pre_mlp_layernorm = nn.RMSNorm(dims.hidden, EPSILON)
        self.mlp = Mixture(dims)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, length, hidden] to the same shape."""
        x = x + self.self_attention(x)
        return x + self.mlp(self.pre_mlp_layernorm(x))


class Llama(nn.Module):
    """A Llama with grouped queries, and the output tied to the word embeddings as in the small ones of Llama 3.2.

    With experts it is one of Qwen3's mixtures.
    """

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.embedding = nn.ModuleDict({"word_embeddings": nn.Embedding(dims.padded_vocabulary, dims.hidden)})
        layers = nn.ModuleList((MixtureLayer if dims.experts else LlamaLayer)(dims) for _ in range(dims.layers))
        self.decoder = nn.ModuleDict({"layers": layers, "final_layernorm": nn.RMSNorm(dims.hidden, EPSILON)})
        initialize(self, ("linear_proj.weight", "linear_fc2.weight"), dims.layers)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [batch, length, padded vocabulary] for ids [batch, length]."""
        words = self.embedding["word_embeddings"]
        x = words(ids)
        for layer in self.decoder["layers"].children():
            x = layer(x)
        return F.linear(self.decoder["final_layernorm"](x), words.weight)


def initialize(model: nn.Module, to_residual: tuple[str, ...], layers: int) -> None:
    """Draw every matrix as GPT-2 does; those that add to the residual stream are smaller."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if name.endswith(to_residual) else 0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)


def loss_of(model: nn.Module, windows: Tensor, device: torch.device) -> Tensor:
    """Return the mean cross-entropy in nats of predicting each next token of [batch, length + 1]."""
    with torch.autocast(device.type, dtype=torch.bfloat16):
        logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


def windows_at(tokens: Tensor, starts: Tensor, length: int) -> Tensor:
    """Gather windows of ``length + 1`` tokens at the given starts: int64 [batch, length + 1]."""
    return tokens[starts[:, None] + torch.arange(length + 1, device=tokens.device)].long()


@torch.no_grad()
def validate(model: nn.Module, tokens: Tensor, dims: Dims) -> float:
    """Return the mean loss over the first 1024 windows of the tokens, side by side."""
    starts = torch.arange(0, len(tokens) - dims.positions, dims.positions, device=tokens.device)[:1024]
    losses = [loss_of(model, windows_at(tokens, part, dims.positions), tokens.device) for part in starts.split(64)]
    return torch.stack(losses).mean().item()


def make_optimizer(model: nn.Module, learning_rate: float) -> torch.optim.AdamW:
    """AdamW that leaves biases and LayerNorms undecayed."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=fused)


def save_nemo(model: nn.Module, dims: Dims, tokenizer: Path, path: Path) -> None:
    """Write the archive ``NAME.nemo`` as NeMo does: NAME's configuration, fp16 weights, and the tokenizer."""
    members: dict[str, bytes] = {}
    config = yaml.safe_load((HERE / path.stem / "model_config.yaml").read_text("utf-8"))
    for key, name in (("vocab_file", "vocab.json"), ("merge_file", "merges.txt")):
        content = (tokenizer / name).read_bytes()
        # NeMo prefixes a random id; the digest keeps the archive reproducible.
        member = f"{hashlib.sha256(content).hexdigest()[:32]}_{name}"
        members[member] = content
        config["tokenizer"][key] = f"nemo:{member}"
    config |= {"num_layers": dims.layers, "hidden_size": dims.hidden, "ffn_hidden_size": dims.inner}
    config |= {"num_attention_heads": dims.heads, "max_position_embeddings": dims.positions}
    if config["num_query_groups"]:
        config["num_query_groups"] = dims.groups
    config |= {"encoder_seq_length": dims.positions}
    members["model_config.yaml"] = yaml.safe_dump(config, sort_keys=False).encode()

    weights = {f"model.{name}": tensor.detach().cpu().half() for name, tensor in model.state_dict().items()}
    stream = io.BytesIO()
    torch.save(weights, stream)
    members["model_weights.ckpt"] = stream.getvalue()
    with tarfile.open(path, "w") as archive:
        root = tarfile.TarInfo("./")
        root.type, root.mode = tarfile.DIRTYPE, 0o755
        archive.addfile(root)
        for name, content in sorted(members.items()):
            entry = tarfile.TarInfo(f"./{name}")
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))


def save_megatron(model: nn.Module, dims: Dims, tokenizer: Path, root: Path) -> None:
    """Write the directory ``NAME`` as Megatron-LM does: arguments, and the fp16 weights of all layers together.

    It saves no tokenizer: the files lie beside the weights, under the names that its arguments have.
    """
    arguments = yaml.safe_load((HERE / root.name / "arguments.yaml").read_text("utf-8"))
    arguments |= {"num_layers": dims.layers, "hidden_size": dims.hidden, "kv_channels": dims.hidden // dims.heads}
    arguments |= {"num_attention_heads": dims.heads, "num_query_groups": dims.groups}
    arguments |= {"num_experts": dims.experts, "moe_router_topk": dims.used}
    arguments |= {"ffn_hidden_size": dims.inner, "moe_ffn_hidden_size": dims.inner}
    arguments |= {"max_position_embeddings": dims.positions, "seq_length": dims.positions}
    arguments |= {"vocab_size": dims.vocabulary_size, "padded_vocab_size": dims.padded_vocabulary}
    weights: dict[str, Tensor] = {}
    layers: dict[str, list[Tensor]] = {}
    for name, tensor in model.state_dict().items():
        half = tensor.detach().cpu().half()
        # What each rank numbers as its own experts is there by the number of the whole model.
        name = name.replace(".mlp.experts.", ".mlp.experts.experts.")
        shared, is_layers = re.subn(r"^decoder\.layers\.\d+", "decoder.layers", name)
        if is_layers:
            layers.setdefault(shared, []).append(half)
        else:
            weights[name] = half
    weights |= {name: torch.stack(parts) for name, parts in layers.items()}
    folder = root / f"iter_{arguments['train_iters']:07d}"
    shutil.rmtree(root, ignore_errors=True)
    folder.mkdir(parents=True)
    dcp.save(weights, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    common = {"args": argparse.Namespace(**arguments), "checkpoint_version": 3.0, "iteration": arguments["train_iters"]}
    torch.save(common, folder / "common.pt")
    formats = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    formats |= {"common_backend": "torch", "common_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(formats))
    (root / "latest_checkpointed_iteration.txt").write_text(str(arguments["train_iters"]))
    for key in ("vocab_file", "merge_file"):
        shutil.copyfile(tokenizer / arguments[key], root / arguments[key])


MODELS: dict[str, tuple[Callable[[Dims], nn.Module], dict[str, int]]] = {
    "gpt3_demo": (Gpt, {}),
    "llama_demo": (Llama, {"groups": 4, "inner": 704}),
    "moe_demo": (
        Llama,
        {"layers": 4, "hidden": 128, "heads": 4, "groups": 2, "inner": 128, "experts": 8, "used": 2},
    ),
}


def train(arguments: argparse.Namespace) -> None:
    """Train, log to ``output/log.jsonl`` and save the model in ``output`` whenever the validation is better."""
    torch.manual_seed(1234)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    vocabulary_size = len(json.loads((arguments.prepared / "vocab.json").read_text("utf-8")))
    build, more = MODELS[arguments.model]
    dims = Dims(vocabulary_size, **more)
    tokens, held_out = (
        torch.from_numpy(np.fromfile(arguments.prepared / f"{name}.bin", dtype="<u2").astype(np.int32)).to(device)
        for name in ("train", "validation")
    )
    model = build(dims).to(device)
    run = torch.compile(loss_of) if device.type == "cuda" and not dims.experts else loss_of
    optimizer = make_optimizer(model, arguments.learning_rate)
    arguments.output.mkdir(parents=True, exist_ok=True)
    print(asdict(dims), sum(p.numel() for p in model.parameters()), "parameters", len(tokens), "tokens", flush=True)

    save, path = save_nemo, arguments.output / f"{arguments.model}.nemo"
    if dims.experts:
        save, path = save_megatron, arguments.output / arguments.model
    mixtures = [module for module in model.modules() if isinstance(module, Mixture)]
    started, best = time.monotonic(), math.inf
    for step in range(1, arguments.steps + 1):
        warm, progress = min(1.0, step / arguments.warmup), step / arguments.steps
        for group in optimizer.param_groups:
            group["lr"] = arguments.learning_rate * warm * (0.01 + 0.99 * (1 + math.cos(math.pi * progress)) / 2)
        starts = torch.randint(len(tokens) - dims.positions, (arguments.batch,), device=device)
        loss = run(model, windows_at(tokens, starts, dims.positions), device)
        optimizer.zero_grad(set_to_none=True)
        sum((BALANCE * mixture.unevenness for mixture in mixtures), start=loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % arguments.every == 0 or step == arguments.steps:
            line = {"step": step, "train_loss": round(loss.item(), 4)}
            line["validation_loss"] = round(validate(model, held_out, dims), 4)
            line["elapsed_s"] = round(time.monotonic() - started, 1)
            print(json.dumps(line), flush=True)
            with (arguments.output / "log.jsonl").open("a") as log:
                log.write(json.dumps(line) + "\n")
            if line["validation_loss"] < best:
                best = line["validation_loss"]
                save(model, dims, arguments.prepared, path)
            elif line["validation_loss"] > best + 0.5:
                raise SystemExit(f"diverged; {path} holds the best weights so far; take a lower learning rate")
    # Logits of the weights before they were rounded to fp16, to prove the archive against.
    ids = held_out[: 4 * 64].view(4, 64).long()
    with torch.no_grad():
        np.savez(arguments.output / "proof.npz", ids=ids.cpu().numpy(), logits=model(ids).float().cpu().numpy())


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepared", type=Path, required=True, help="what prepare_novels.py wrote")
    parser.add_argument("--output", type=Path, required=True, help="folder for the checkpoint and log.jsonl")
    parser.add_argument("--model", choices=sorted(MODELS), default="gpt3_demo")
    parser.add_argument("--steps", type=int, default=4600)
    parser.add_argument("--batch", type=int, default=64, help="windows of 512 tokens a step")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="peak; cosine down to a hundredth")
    parser.add_argument("--warmup", type=int, default=300, help="steps")
    parser.add_argument("--every", type=int, default=2300, help="steps between validations and saves")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
