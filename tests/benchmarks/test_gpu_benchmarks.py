"""What the GPU benchmarks count on: the models' sizes, the requests that others were measured with, the page."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from support.shards.gpt2_checkpoint import random_gpt2, write_shards
from transformers import GPT2Config, GPT2LMHeadModel

from backends.fastertransformer.engine.model.families import read_config
from backends.fastertransformer.engine.model.hub_experts import ExpertsReader
from backends.fastertransformer.engine.model.precision import choose_precision
from backends.fastertransformer.engine.model.reader import Reader
from backends.fastertransformer.engine.model.shards import planned
from backends.fastertransformer.engine.model.weights import read_model
from backends.fastertransformer.engine.parallel.partition import Partition
from benchmarks.engine.continuous import News, answer_all
from benchmarks.gpu import agreement as gpu_agreement
from benchmarks.gpu.load import mixed_asks
from benchmarks.gpu.report import main
from benchmarks.gpu.sizes import SIZES, LatentSize, LlamaSize, MixtureSize, Size, T5Size
from handover.errors import ConfigError

DECODED = """model,data_type,gpus,batch,input_length,output_length,floor_ms,compute_ms,peer_ms,first_ms,ours_ms,ratio,peer_ratio,gpu,torch,commit
5B,fp16,1,1,60,20,45.4,1.0,,60.0,53.0,1.17,,H200,2.11,abc
5B,fp16,1,8,60,20,45.4,8.0,,70.0,61.0,1.34,,H200,2.11,abc
5B,fp16,2,1,60,20,22.7,0.5,,40.0,31.0,1.37,,H200,2.11,abc
"""  # noqa: E501 (a CSV)

SCALED = """model,data_type,gpus,sums,batch,input_length,output_length,floor_ms,first_ms,ours_ms,ratio,speed_up,gpu,torch,commit
5B,fp16,1,,1,60,20,45.4,60.0,54.0,1.19,,H200,2.11,abc
5B,fp16,4,peers,1,60,20,11.35,20.0,17.0,1.5,3.18,H200,2.11,abc
5B,fp16,4,nccl,1,60,20,11.35,20.0,34.0,3.0,1.59,H200,2.11,abc
"""  # noqa: E501 (a CSV)


@pytest.mark.parametrize(("name", "gigabytes"), [("1.3B", 2.63), ("5B", 10.09), ("20B", 40.50), ("43B", 81.51)])
def test_a_model_has_as_many_bytes_as_the_floors_were_published_for(name: str, gigabytes: float) -> None:
    assert SIZES[name].weight_bytes(2) / 1e9 == pytest.approx(gigabytes, rel=2e-3)  # theirs has the vectors too


def test_weights_are_those_of_transformers_gpt2() -> None:
    size = Size(3, 64, 4, 500)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=500, n_positions=16, n_embd=64, n_layer=3, n_head=4))
    names = ("c_attn.weight", "c_proj.weight", "c_fc.weight", "wte.weight")
    matrices = sum(tensor.numel() for name, tensor in model.named_parameters() if name.endswith(names))
    assert size.weight_bytes(2) == 2 * matrices


def test_the_mixed_load_is_the_one_that_other_servers_were_measured_with() -> None:
    asks = mixed_asks(1000)
    assert (len(asks), sum(len(ask.prompt) for ask in asks), sum(ask.count for ask in asks)) == (256, 54_263, 28_703)


class Script:
    """A server that says a token of each request in turn, each the same time after the last."""

    def __init__(self, counts: list[int]) -> None:
        self._counts, self._under_way, self.most = counts, dict[int, int](), 0
        self._moment_s = 0.0

    def send(self, index: int) -> None:
        """Begin."""
        self._under_way[index] = self._counts[index]
        self.most = max(self.most, len(self._under_way))

    def next_news(self) -> News:
        """Say the next token."""
        index, left = next(iter(self._under_way.items()))
        del self._under_way[index]
        self._moment_s += 0.5
        if left > 1:
            self._under_way[index] = left - 1
        return News(index, self._moment_s, left == 1)


def test_a_load_keeps_so_many_requests_under_way_and_measures_between_their_tokens() -> None:
    server = Script([3, 1, 4, 2, 5])
    _, gaps = answer_all(server, 5, 2)
    assert server.most == 2
    assert len(gaps) == 3 + 1 + 4 + 2 + 5 - 5
    assert set(gaps) <= {500.0, 1000.0} and gaps[-1] == 500.0  # two share the time until one is left


def test_the_page_has_the_use_cases_at_one_row_by_gpus(tmp_path: Path) -> None:
    (tmp_path / "decode.csv").write_text(DECODED)
    (tmp_path / "scaling.csv").write_text(SCALED)
    main([f"--directory={tmp_path}", f"--picture={tmp_path / 'latency.png'}"])
    lines = (tmp_path / "report.md").read_text().splitlines()
    cases = [line for line in lines if "Question answering" in line]
    assert [line.split(" | ")[4:8] for line in cases] == [
        ["54.0", "1", "1", "1"],
        ["31.0", "2", "1", "2"],
        ["17.0", "4", "1", "4"],  # not NCCL's; one GPU in the same run
    ]
    beside = next(line for line in lines if line.startswith("| 5B | fp16 | 1 | 60 | 20 | 54.0"))
    assert beside.split(" | ")[5:] == ["54.0", "1.19", "31.0", "1.37", "1.74", "17.0", "1.5", "3.18 |"]
    assert (tmp_path / "latency.png").stat().st_size > 1000


def numel(model: torch.nn.Module, *names: str) -> int:
    return sum(each.numel() for name, each in model.named_parameters() if name.endswith(names))


@pytest.mark.parametrize("is_gated", [False, True])
def test_a_t5_reads_its_encoder_once_and_its_decoder_for_every_token(is_gated: bool) -> None:
    size = T5Size(3, 64, 4, 500, head_size=24, inter=160, is_gated=is_gated)
    model = size.peer()
    projections = tuple(f".{name}.weight" for name in ("q", "k", "v", "o", "wi", "wi_0", "wi_1", "wo"))
    made_once = numel(model, "EncDecAttention.k.weight", "EncDecAttention.v.weight")
    assert size.once_bytes(2) == 2 * (numel(model.encoder, *projections) + made_once)
    head = model.lm_head.weight.numel()
    assert size.weight_bytes(2) == 2 * (numel(model.decoder, *projections) - made_once + head)
    both = size.once_bytes(1) * 7 + size.weight_bytes(1) * 5
    assert size.operations(2, 7, 5) == 2 * 2 * both


def test_a_gptj_reads_as_much_as_transformers() -> None:
    size = Size(3, 256, 2, 500, "GPT-J")
    model = size.peer()
    matrices = numel(model, "_proj.weight", "fc_in.weight", "fc_out.weight", "lm_head.weight")
    assert size.weight_bytes(2) == 2 * matrices


@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_llama_reads_as_much_as_transformers(qk_norm: bool) -> None:
    size = LlamaSize(3, 64, 8, 500, kv_heads=2, head_size=16, inter=96, qk_norm=qk_norm)
    assert size.weight_bytes(2) == 2 * numel(size.peer(), "_proj.weight", "lm_head.weight")


def test_a_mixture_reads_what_a_token_uses_of_transformers_experts() -> None:
    sizes = {"kv_heads": 2, "head_size": 16, "inter": 96, "qk_norm": True, "experts": 6}
    size = MixtureSize(3, 64, 8, 500, **sizes, used=2)
    model = size.peer()
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    always = numel(model, "q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")
    always += numel(model, "lm_head.weight", "mlp.gate.weight")
    experts = numel(model, "experts.gate_up_proj", "experts.down_proj")
    assert size.weight_bytes(2) == 2 * (always + experts // 3)


def test_a_deepseek_reads_what_a_token_uses_of_transformers_experts() -> None:
    sizes = {"latent": 24, "plain": 12, "rotated": 8, "value": 10, "dense_inter": 80, "experts": 6, "used": 2}
    size = LatentSize(3, 64, 8, 500, kv_heads=8, inter=48, shared=2, **sizes)
    model = size.peer()
    assert type(model).__name__ == "DeepseekV2ForCausalLM"
    always = numel(model, "lm_head.weight", "mlp.gate.weight", "_proj.weight", "kv_a_proj_with_mqa.weight")
    experts = numel(model, "experts.gate_up_proj", "experts.down_proj")
    assert size.weight_bytes(2) == 2 * (always + experts // 3)


@pytest.mark.parametrize(
    "name",
    [
        "5B",
        "GPT-J 6B",
        "T5 11B",
        "T5 v1.1 XXL",
        "Qwen3 0.6B",
        "Qwen3 14B",
        "Llama 3.1 70B",
        "Nemotron-H 8B",
        "Qwen3.5 9B",
    ],
)
def test_a_models_config_has_the_bytes_that_are_counted(name: str, tmp_path: Path) -> None:
    size = SIZES[name]
    size.write(tmp_path)
    config = read_config(tmp_path, size.model_type)
    meta = torch.device("meta")
    precision = choose_precision("bf16", torch.device("cuda"))
    kind = partial(ExpertsReader, {}) if config.decoder else Reader
    reader = kind(config, 1, precision, meta, False, None, planned([]))
    read_model(reader, config, Partition(range(config.num_layer)), has_head=name == "T5 v1.1 XXL")
    whole = size.weight_bytes(2) + size.once_bytes(2)
    embedding = 2 * size.vocab * size.hidden  # that may not be the head; beside norms and biases
    assert whole < reader.size_bytes < 1.01 * whole + embedding


def test_what_is_no_decoders_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.ini"):
        gpu_agreement.main([f"--checkpoint={tmp_path}"])
    (tmp_path / "config.ini").write_text("[encoder]\nnum_layers = 1\n[decoder]\nnum_layers = 1\n[structure]\n")
    with pytest.raises(ConfigError, match="holds no decoder"):
        gpu_agreement.main([f"--checkpoint={tmp_path}"])


def test_a_checkpoint_agrees_with_itself_and_not_where_the_limits_are_narrower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = write_shards(random_gpt2(n_positions=128, initializer_range=0.1), tmp_path, 1)
    arguments = gpu_agreement.AgreementArguments(checkpoint=shards, device="cpu")
    assert gpu_agreement.compare_checkpoint(arguments, shards)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["fp32", "0.0e+00", "100.0%", "0.0e+00"]
    monkeypatch.setattr(gpu_agreement, "_SHIFTS", {"bf16": 1e-6})
    assert not gpu_agreement.compare_checkpoint(arguments, shards)
