"""Compare the network on a GPU, in every number format, with the same network on the CPU in fp32.

    python3 -m benchmarks.gpu.agreement --layers=8 --hidden=1024

Shards of every family are made up and written as FasterTransformer has them, a directory of Hugging Face of what it has
not; the unit tests show that the network on
the CPU gives Hugging Face's logits. Rows of different length are prefilled, extended and decoded, by the steps that the
engine takes on the device: from CUDA graphs but for "eager". A line for each family and format: relative error of the
logits, ||gpu - cpu|| / ||cpu||, the largest difference of the chosen tokens' log-probabilities, and how many of the
most probable tokens agree. Rounding explains about 1e-6 (fp32), 2e-3 (fp16) and 1e-2 (bf16, int8); exit status 1
where it is ten times that. Last, "engine": the tokens that an engine in fp32 generates as the CPU does, greedy, by beam
search and by sampling, from requests that come together; exit status 1 below 99%.

    python3 -m benchmarks.gpu.agreement --checkpoint=DIRECTORY --tensor-para-size=2

A checkpoint as FasterTransformer has it, instead: the engine on the CPU in fp32 continues prompts, made of its
most probable words, greedily; engines on the device, in each format, score the same tokens and continue the same
prompts.
Exit status 1 where a token's log-probability differs by more than rounding explains, or where the device chooses a
token that the CPU finds less likely than its own by more than twice that.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from backends.fastertransformer.engine.arrays import Array
from backends.fastertransformer.engine.cache.kv_cache import KvCache
from backends.fastertransformer.engine.cache.sizing import CacheShape
from backends.fastertransformer.engine.cache.states import States
from backends.fastertransformer.engine.engine import Engine, open_engine
from backends.fastertransformer.engine.model.config import ModelConfig
from backends.fastertransformer.engine.model.families import read_config
from backends.fastertransformer.engine.model.network import Network
from backends.fastertransformer.engine.model.precision import choose_precision
from backends.fastertransformer.engine.model.reader import Reader
from backends.fastertransformer.engine.model.shards import Piece
from backends.fastertransformer.engine.model.weights import load_weights, read_model
from backends.fastertransformer.engine.parallel.partition import Partition
from backends.fastertransformer.engine.settings import Settings
from backends.fastertransformer.engine.steps.steps import Steps
from benchmarks.engine.generate import Ask, tensors_of
from benchmarks.engine.random_directory import write_directory
from benchmarks.gpu.sizes import for_encoder
from ft_format.config_ini import ConfigIni
from ft_format.families import find_family
from ft_format.weight_format import find_format
from handover.arguments import ScriptArguments
from handover.errors import ConfigError, SlipwayError, exit_status

_LIMITS = {"fp32": 1e-5, "fp16": 2e-2, "fp16 eager": 2e-2, "bf16": 1e-1, "fp16 int8": 1e-1}
_SHIFTS = {"fp32": 1e-3, "fp16": 1e-1, "bf16": 1.0, "fp16 int8": 1.0}  # of a token's log-probability
_PROMPTS, _INPUT, _OUTPUT = 16, 24, 64  # of a checkpoint
_BLOOM = "has_positional_encoding = 0\nuse_attention_linear_bias = 1\nhas_pre_decoder_layernorm = 1\n"
_GATED, _TIED = "use_gated_activation = 1\n", "tie_word_embeddings = 1\n"
_GROUPED = "kv_head_num = 2\nmax_pos_seq_len = 512\n"
_GEMMA = {"attn_logit_softcapping": 5.0, "sliding_window": 9, "query_pre_attn_scalar": 32}
_EXPERTS = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
_SHARED = {"n_routed_experts": 16, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0}
_SHARED |= {"use_qk_norm": True}
_LATENT = {"kv_lora_rank": 48, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "head_dim": 16, "v_head_dim": 24}
_LLAMA4 = {"intermediate_size_mlp": 256, "no_rope_layer_interval": 2, "floor_scale": 8, "attn_scale": 0.1}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_n_groups": 2, "mamba_d_state": 16}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "full_attention_interval": 2, "rms_norm_eps": 1e-2}
_DELTA |= {"linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_conv_kernel_dim": 4}
# Name: model_type, section, size of a head, keys of the section's own, or of a T5's stacks and its structure; keys of
# config.json of what has no shards.
_FAMILIES: dict[str, tuple[Any, ...]] = {
    "gpt": ("GPT", "gpt", 64, "max_pos_seq_len = 512\n"),
    "bloom": ("GPT", "gpt", 64, _BLOOM),
    "gptj": ("GPT-J", "gptj", 64, "rotary_embedding = 32\n"),
    "gptj 256": ("GPT-J", "gptj", 256, "rotary_embedding = 64\n"),
    "gptneox": ("GPT-NeoX", "gptneox", 64, "rotary_embedding = 16\n"),
    "llama": ("Llama", "llama", 32, "rotary_embedding = 32\n" + _GROUPED),
    "qwen3": ("Llama", "", 32, {"model_type": "qwen3"}),
    "gemma2": ("Llama", "", 32, {"model_type": "gemma2", "final_logit_softcapping": None, **_GEMMA}),
    "qwen3_moe": ("Llama", "", 32, {"model_type": "qwen3_moe", "norm_topk_prob": True, **_EXPERTS}),
    "glm4_moe": ("Llama", "", 32, {"model_type": "glm4_moe", "n_group": 4, "topk_group": 2, **_EXPERTS, **_SHARED}),
    "gpt_oss": ("Llama", "", 32, {"model_type": "gpt_oss", "num_local_experts": 16, "num_experts_per_tok": 2}),
    "llama4": ("Llama", "", 32, {"model_type": "llama4_text", "attention_chunk_size": 6, "moe_layers": [], **_LLAMA4}),
    "deepseek": (
        "Llama",
        "",
        32,
        {"model_type": "deepseek_v3", "first_k_dense_replace": 99, "num_key_value_heads": None, "q_lora_rank": 40}
        | _LATENT,
    ),
    "falcon_h1": ("Llama", "", 32, {"model_type": "falcon_h1", **_MAMBA}),
    "qwen3_5": ("Llama", "", 32, {"model_type": "qwen3_5_text", **_DELTA}),
    "t5": ("T5", "", 64, "feed_forward_proj = relu\n" + _TIED, ""),
    "t5 v1.1": ("T5", "", 128, "feed_forward_proj = gated-gelu\ntie_word_embeddings = 0\n", _GATED),
    "t5 bias": ("T5", "", 64, "feed_forward_proj = gelu\n" + _TIED, "t5_with_bias = 1\n"),
}


@dataclass(frozen=True)
class AgreementArguments(ScriptArguments):
    """The networks' shape."""

    layers: int = field(default=6, metadata={"help": "transformer blocks"})
    hidden: int = field(default=512, metadata={"help": "width"})
    vocab: int = field(default=4096, metadata={"help": "rows of the embedding"})
    families: tuple[str, ...] = field(default=tuple(_FAMILIES), metadata={"help": "JSON list of what is compared"})
    device: str = field(default="cuda:0", metadata={"help": "what is compared with the CPU"})
    checkpoint: Path | None = field(default=None, metadata={"help": "shards and config.ini of a decoder, instead"})
    tensor_para_size: int = field(default=1, metadata={"help": "GPUs that share the checkpoint's layers"})


def write_checkpoint(arguments: AgreementArguments, name: str, directory: Path) -> ModelConfig:
    """Write random shards and their config.ini, or a directory of Hugging Face."""
    model_type, section, head_size, own, *structure = _FAMILIES[name]
    heads, inter = arguments.hidden // head_size, 4 * arguments.hidden
    directory.mkdir()
    if isinstance(own, dict):
        shape = {"vocab_size": arguments.vocab, "hidden_size": arguments.hidden, "intermediate_size": inter}
        shape |= {"num_hidden_layers": arguments.layers, "num_attention_heads": heads, "num_key_value_heads": 2}
        ends = {"head_dim": head_size, "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1}
        write_directory({**shape, **ends, **own}, directory)
        return read_config(directory, model_type)
    ids = f"vocab_size = {arguments.vocab}\nstart_id = 0\nend_id = 1\n"
    sizes = f"head_num = {heads}\nsize_per_head = {head_size}\ninter_size = {inter}\nnum_layer = {arguments.layers}\n"
    text = f"[{section}]\n{ids}{sizes}{own}"
    if structure:
        stack = f"num_heads = {heads}\nd_kv = {head_size}\nd_ff = {inter}\nnum_layers = {arguments.layers}\n"
        stack += f"d_model = {arguments.hidden}\nrelative_attention_num_buckets_or_max_pos_seq_len = 32\n{ids}{own}"
        stack += "decoder_start_token_id = 0\neos_token_id = 1\n"
        text = f"[encoder]\n{stack}[decoder]\n{stack}[structure]\n{structure[0]}"
    (directory / "config.ini").write_text(text)
    config = read_config(directory, model_type)
    generator = torch.Generator().manual_seed(0)

    def write(piece: Piece) -> Tensor:
        shape, numbers = piece.shape, torch.randn(piece.shape, generator=generator)
        name = piece.file.removesuffix(".bin").removesuffix(".0")
        # Every product keeps the size of what it multiplies, but for T5, whose weights have the scores' scale in them.
        fan_in = shape[0] if len(shape) > 1 and ("layers." in name or "block." in name) else 1
        numbers *= 0.1 if fan_in == 1 else fan_in**-0.5
        if not config.scales_attention and ("SelfAttention" in name or "EncDecAttention" in name):
            numbers *= head_size**-0.25 if name.endswith((".q.weight", ".k.weight", "qkv.weight")) else 1
        if "norm" in name and name.endswith("weight"):
            numbers += 1
        if name in ("model.wte", "shared.weight_T") or "lm_head" in name:
            numbers *= 10 if len(shape) > 1 else 1
        numbers.numpy().tofile(directory / piece.file)
        return torch.empty(shape, device="meta")

    precision = choose_precision("fp32", torch.device("cpu"))
    reader = Reader(config, 1, precision, torch.device("meta"), True, None, write)
    read_model(reader, config, Partition(range(config.num_layer)), has_head=True)
    return config


def open_steps(directory: Path, config: ModelConfig, kind: str, device: torch.device) -> Steps:
    """Load a network, with the cache and the captured steps that the engine has on the device."""
    data_type, _, how = kind.partition(" ")
    precision = choose_precision(data_type, device, find_format(int(how == "int8")))
    network = Network(config, load_weights(directory, config, 1, precision, device))
    assert network.weights.decoder, "there is no decoder"
    entries, has_cross = network.weights.decoder.entries, config.encoder is not None
    shape = CacheShape(entries, precision.compute, has_cross, network.ops.is_head_major)
    states = States(network.weights.decoder.states, 8, device) if config.keeps_states else None
    steps = Steps(network, KvCache(shape, device, 1 << 30, 96, states=states))
    for rows, tokens in ((4, 0), (0, 128)) if how != "eager" and network.ops.can_capture else ():
        steps.capture(rows, tokens)
    return steps


@torch.inference_mode()
def run(steps: Steps) -> Tensor:
    """Prefill, extend and decode three rows -> fp32 logits [rows, tokens, V] on the CPU."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, steps.config.vocab_size, (3, 64), generator=generator).numpy()
    lengths, nothing = np.array([40, 9, 23]), np.full(3, -1)
    source = 40 if steps.config.encoder else 0
    steps.slots.allocate(0, [steps.cache.allocator.take(96, source=source) for _ in range(3)], lengths + 8)
    contexts = np.concatenate([row[:length] for row, length in zip(ids, lengths.tolist(), strict=True)])
    if source:
        steps.encode(contexts, lengths, nothing, 0)
    begun = steps.extend(contexts, np.zeros_like(lengths), lengths, 0).split(lengths.tolist())
    hidden = [torch.stack([row[:9] for row in begun])]
    hidden.append(steps.extend(ids[:, 40:48].flatten(), lengths, np.full(3, 8), 0).view(3, 8, -1))
    logits = [steps.predictions.logits(torch.cat(hidden, 1)).cpu()]
    for step in range(8, 24):
        steps.slots.ids[:3] = torch.from_numpy(ids[:, 40 + step])
        logits.append(steps.decode(3)[0][:, None].cpu())
    return torch.cat(logits, 1)


def generate(directory: Path, config: ModelConfig, model_type: str, device: torch.device) -> Array:
    """Answer requests of several kinds in fp32 -> their tokens, one behind the other."""
    draw = np.random.default_rng(2)
    settings = Settings(directory, 1, 1, "fp32", model_type=model_type, kv_cache_bytes=1 << 30)
    engine = open_engine(settings, device)
    requests = []
    for index, (length, count) in enumerate(((40, 24), (9, 40), (23, 30), (60, 8), (1, 33), (31, 20))):
        asks = [Ask(draw.integers(0, config.vocab_size, length).tolist(), count) for _ in range(1 + index % 2)]
        tensors = tensors_of(asks, config.vocab_size)
        kinds = {"beam_width": np.uint32([1, 3, 1][index % 3]), "runtime_top_k": np.uint32([1, 1, 5][index % 3])}
        tensors |= {name: np.full((len(asks), 1), value) for name, value in kinds.items()}
        requests.append(engine.parse(for_encoder(tensors) if config.encoder else tensors))
    answers = engine.generate(requests)
    engine.close()
    return np.concatenate([answer["output_ids"].astype(np.int64).ravel() for answer in answers])


def compare(arguments: AgreementArguments) -> bool:
    """Print the table; say whether all agree."""
    agrees, device = True, torch.device(arguments.device)
    sys.stdout.write(f"{'family':9} {'format':10} {'error':>9} {'log-probability':>16} {'tokens that agree':>18}\n")
    with tempfile.TemporaryDirectory(prefix="slipway-agreement-") as temporary:
        for name in arguments.families:
            directory = Path(temporary) / name
            config = write_checkpoint(arguments, name, directory)
            expected = run(open_steps(directory, config, "fp32", torch.device("cpu")))
            best = expected.argmax(-1, keepdim=True)
            for kind, limit in _LIMITS.items():
                found = run(open_steps(directory, config, kind, device))
                error = float((found - expected).norm() / expected.norm())
                shift = (found.log_softmax(-1) - expected.log_softmax(-1)).gather(-1, best).abs().max()
                same = (found.argmax(-1, keepdim=True) == best).double().mean()
                sys.stdout.write(f"{name:9} {kind:10} {error:9.1e} {float(shift):16.1e} {float(same):18.1%}\n")
                agrees &= error < limit
            model_type = _FAMILIES[name][0]
            sides = (generate(directory, config, model_type, where) for where in (torch.device("cpu"), device))
            same = float(np.equal(*sides).mean())
            sys.stdout.write(f"{name:9} {'engine':10} {'':26} {same:18.1%}\n")
            agrees &= same > 0.99
    return agrees


def continued(engine: Engine, ids: Array, count: int, k: int = 1) -> Array:
    """Continue each of some prompts, [rows, n], by count of the k most probable tokens -> uint32 [rows, n + count]."""
    tensors = tensors_of([Ask(row, count) for row in ids.tolist()], engine.config.vocab_size)
    tensors |= {"runtime_top_k": np.full((len(ids), 1), k, np.uint32)}
    tensors |= {"random_seed": np.arange(len(ids), dtype=np.uint64)[:, None]}
    found: Array = engine.generate([engine.parse(tensors)])[0]["output_ids"][:, 0].astype(np.uint32)
    return found


def log_probs_of(engine: Engine, ids: Array) -> Array:
    """Return the log-probability of each token, [rows, n], after those before it; 0 of the first."""
    tensors = tensors_of([Ask(row, 1) for row in ids.tolist()], engine.config.vocab_size)
    wish = np.ones((len(ids), 1), np.bool_)
    tensors |= {"is_return_log_probs": wish, "is_return_context_log_probs": wish}
    return engine.generate([engine.parse(tensors)])[0]["context_log_probs"]


def compare_checkpoint(arguments: AgreementArguments, directory: Path) -> bool:
    """Print the table for a checkpoint; say whether all agree."""
    family = find_family(ConfigIni.read(directory, ConfigError))
    if family is None or family.is_encoder_decoder:
        raise ConfigError(f"{directory} holds no decoder", "give a directory of FasterTransformer's shards, <T>-gpu")
    sizes = {"tensor_para_size": arguments.tensor_para_size, "pipeline_para_size": 1, "kv_cache_bytes": 1 << 28}
    sizes |= {"model_type": family.model_types[0]}

    def opened(kind: str, device: torch.device) -> Engine:
        data_type, _, how = kind.partition(" ")
        return open_engine(Settings(directory, data_type=data_type, int8_mode=int(how == "int8"), **sizes), device)

    engine = opened("fp32", torch.device("cpu"))
    begin = np.full((_PROMPTS, 1), engine.config.start_id, np.uint32)
    prompts = continued(engine, begin, _INPUT - 1, 40)  # words as the model has learnt them
    expected = continued(engine, prompts, _OUTPUT)
    known = log_probs_of(engine, expected)
    agrees = True
    sys.stdout.write(f"{'format':10} {'log-probability':>16} {'tokens that agree':>18} {'lost by others':>16}\n")
    for kind, limit in _SHIFTS.items():
        other = opened(kind, torch.device(arguments.device))
        shift = float(np.abs(log_probs_of(other, expected) - known).max())
        found = continued(other, prompts, _OUTPUT)
        other.close()
        is_same = found == expected
        # Where a row first differs, the CPU says by how much it finds the other token less likely than its own.
        firsts = [(row, int(places.argmin())) for row, places in enumerate(is_same) if not places.all()]
        theirs = log_probs_of(engine, found) if firsts else known
        loss = max((float(known[place] - theirs[place]) for place in firsts), default=0.0)
        same = is_same[:, _INPUT:].mean()
        sys.stdout.write(f"{kind:10} {shift:16.1e} {same:18.1%} {loss:16.1e}\n")
        agrees &= shift < limit and loss < 2 * limit
    engine.close()
    return agrees


def main(argv: Sequence[str]) -> None:
    """Compare all; a disagreement is an error."""
    torch.backends.cuda.matmul.allow_tf32 = False
    arguments = AgreementArguments.from_argv(argv, description=__doc__)
    directory = arguments.checkpoint
    if not (compare_checkpoint(arguments, directory) if directory else compare(arguments)):
        raise SlipwayError("the network on the device is not the network on the CPU", "see the lines above")


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "benchmarks.gpu.agreement"))
