"""benchmarks.peers.compare: its workloads and figures by hand, and a whole run against a stand-in for vLLM."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
import transformers
from support.servers.vllm_stand_in import VERSION, write_package

from benchmarks.gpu.load import mixed_asks
from benchmarks.gpu.sizes import SIZES, LlamaSize, Size, find_size
from benchmarks.peers import compare, vllm
from benchmarks.peers.models import hugging_face_config, made_up_model
from benchmarks.peers.table import agreement_of, comparison_rows
from benchmarks.peers.vllm import engine_settings
from benchmarks.peers.vllm_weights import make_weights_random
from benchmarks.peers.workloads import (
    Ask,
    Job,
    Record,
    draw_arrivals,
    draw_mixed,
    percentile,
    run_online,
    steady_tokens_per_s,
    stream_figures,
)
from handover.errors import ConfigError, ServerError

TESTS = Path(__file__).resolve().parents[1]
SMALL = ("--data-type=fp32", "--rows=[1,2]", "--lengths=[[8,4]]", "--repeats=1", "--kv-cache-bytes=67108864")


def test_the_requests_at_once_are_those_of_the_other_benchmarks() -> None:
    import random

    asks = draw_mixed(1000, 256, compare.CompareArguments().burst_lengths, random.Random(3))
    lengths = [(len(ask.prompt), ask.count) for ask in asks]
    assert lengths == [(len(ask.prompt), ask.count) for ask in mixed_asks(1000)]
    assert sum(count for _, count in lengths) == 28_703


@pytest.mark.parametrize("percent", [0, 37.5, 50, 99, 100])
def test_a_percentile_is_numpys(percent: float) -> None:
    values = [5.0, 1.0, 9.0, 2.5, 2.5, 7.0]
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_arrivals_have_the_rate_that_was_asked_for() -> None:
    moments = draw_arrivals(20_000, 40.0, seed=1)
    assert moments == sorted(moments)
    assert 20_000 / moments[-1] == pytest.approx(40, rel=0.03)  # 4 standard errors
    gaps = np.diff(moments)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)  # exponential


def test_stream_figures_by_hand() -> None:
    # Due at 0 and 1 s; first tokens after 100 and 300 ms, then gaps of 10 and 30 ms, the last of two tokens.
    records = [
        Record(0.0, 3, [(0.100, 1), (0.110, 2), (0.140, 3)]),
        Record(1.0, 4, [(1.300, 1), (1.310, 2), (1.340, 4)]),
    ]
    figures = stream_figures(records, start_s=-0.66)
    assert figures["ttft_p50_ms"] == pytest.approx(200)
    assert figures["itl_p50_ms"] == pytest.approx(20) and figures["itl_p99_ms"] == pytest.approx(30)
    assert figures["e2e_p50_ms"] == pytest.approx(240)
    assert figures["output_tokens_per_s"] == pytest.approx(7 / 2.0)


def test_the_steady_rate_leaves_out_start_and_end() -> None:
    # Ten tokens a second over 10 s, in answers of five, behind a start without any.
    record = Record(0.0, 100, [(moment / 2, 5 * moment) for moment in range(1, 21)])
    assert steady_tokens_per_s([record], 0.0) == pytest.approx(10, rel=0.12)  # 2.5 to 7 s: nine answers of five
    slow_start = Record(0.0, 8, [(9.0, 4), (10.0, 8)])
    assert steady_tokens_per_s([slow_start], 0.0) == 0


class Sleepy:
    """Answers any request after 20 ms with all its tokens."""

    async def stream(self, ask: Ask, record: Record) -> None:
        await asyncio.sleep(0.02)
        record.times.append((asyncio.get_running_loop().time(), ask.count))


def test_a_wrong_number_of_tokens_is_no_figure(tmp_path: Path) -> None:
    class Short(Sleepy):
        async def stream(self, ask: Ask, record: Record) -> None:
            await super().stream(ask, record)
            record.times[-1] = (record.times[-1][0], ask.count - 1)

    job: Any = type("Job", (), {"vocab": 9, "requests": 2, "clients": 1, "rates_per_s": (), "shares": ()})
    with pytest.raises(RuntimeError, match="tokens where"):
        asyncio.run(run_online(job, Short()))


@pytest.mark.parametrize("name", ["Llama 3.1 8B", "Qwen3 0.6B", "1.3B"])
def test_a_shape_is_described_as_hugging_face_does(name: str) -> None:
    size = find_size(name)
    content = hugging_face_config(size, "bf16")
    config = transformers.AutoConfig.for_model(**content)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    matrices = [p.numel() for n, p in model.named_parameters() if p.dim() == 2 and "wpe" not in n]
    embedding = size.vocab * size.hidden if isinstance(size, LlamaSize) and not size.is_tied else 0  # not read a token
    assert sum(matrices) - embedding == size.weight_bytes(1)
    if isinstance(size, LlamaSize):
        assert (config.head_dim, config.num_key_value_heads) == (size.head_size, size.kv_heads)
        assert config.rope_parameters["rope_theta"] == size.rope_theta


def test_a_model_says_how_long_its_texts_may_be(tmp_path: Path) -> None:
    assert made_up_model("1.3B", "fp16", tmp_path / "gpt").positions == 2048
    assert made_up_model("Llama 3.1 8B", "fp16", tmp_path / "llama").positions == 131072


def test_a_shape_that_vllm_cannot_make_up_is_refused() -> None:
    with pytest.raises(ConfigError, match="T5 cannot be compared"):
        hugging_face_config(SIZES["T5 11B"], "fp16")
    assert hugging_face_config(Size(1, 64, 2, 512), "fp16")["n_embd"] == 64


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--parts=[\"offlin\"]", "offline"),
        ("--peer=sglang", "vllm"),
        ("--data-type=fp8", "fp16"),
        ("--tensor-para-size=0", "the number of GPUs"),
        ("--clients=0", "give --rates"),
        ("--burst-lengths=[[9,3],[2,5]]", "fewest, most"),
        ("--peer-env=[\"A\"]", "NAME=value"),
        ("--peer-settings=[\"A\"]", "--peer-settings holds 'A', which is not NAME=value"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused_at_once(flag: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        compare.main([flag])
    assert said in str(error.value)


def test_medians_extremes_and_ratios_by_hand() -> None:
    def lines(*values: float) -> list[dict[str, Any]]:
        return [{"case": "static", "figures": {"latency_ms": value}} for value in values]

    (row,) = comparison_rows({"slipway": lines(10, 30, 20), "vllm": lines(50, 30)}, "m", "fp16", "c0ffee")
    assert (row.slipway, row.vllm, row.ratio, row.rounds) == (20, 40, 0.5, 3)
    assert (row.slipway_low, row.slipway_high, row.vllm_low, row.vllm_high) == (10, 30, 30, 50)
    assert row.commit == "c0ffee"


def test_agreement_by_hand() -> None:
    ours, theirs = ([{"case": "agreement", "figures": {"tokens": t}}] for t in ([[1, 2], [3, 4]], [[1, 2], [9, 4]]))
    assert agreement_of({"slipway": ours, "vllm": theirs}) == 0.75
    assert agreement_of({"slipway": ours}) is None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose greedy choices are clear."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=500,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.1,
    )
    directory = tmp_path_factory.mktemp("compared") / "tiny"
    transformers.LlamaForCausalLM(config).eval().save_pretrained(directory)
    return directory


def peer(directory: Path, **env: str) -> list[str]:
    given = {"PYTHONPATH": str(TESTS), "STAND_IN_COMMIT": "abc123", **env}
    pairs = [f"{name}={value}" for name, value in given.items()]
    return [f"--peer-path={write_package(directory)}", f"--peer-env={json.dumps(pairs)}"]


@pytest.mark.long  # CI has a whole run whose peer fails, below, and every formula by hand
def test_one_command_measures_both_engines_by_turns(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    few = ["--burst=2", "--burst-lengths=[[3,9],[2,5]]", "--clients=2", "--requests=3", "--shares=[0.5]"]
    few += ["--seconds=0.1", "--longest=2048", '--peer-settings=["attention_backend=TRITON_ATTN","block_size=32"]']
    table = tmp_path / "table.csv"
    compare.main([f"--model={model}", f"--csv={table}", *SMALL, *few, *peer(tmp_path / "peer")])
    printed = capfd.readouterr().out
    turns = [line for line in printed.splitlines() if line in {f"{e}, {p}" for e in ("vllm", "slipway") for p in ("offline", "online")}]  # fmt: skip  # noqa: E501
    assert turns == ["vllm, offline", "slipway, offline", "vllm, online", "slipway, online"]
    assert f"vllm {VERSION} (abc123)" in printed
    rows = pandas.read_csv(table)
    assert set(rows.vllm_version) == {VERSION} and set(rows.vllm_commit) == {"abc123"}
    assert rows.vllm_settings.str.contains("'attention_backend': 'TRITON_ATTN', 'block_size': 32").all()
    measured = rows[rows.case != "agreement"]
    assert measured.ratio.to_numpy() == pytest.approx((measured.slipway / measured.vllm).to_numpy(), rel=1e-4)
    assert {"static 1 x 8/4", "static 2 x 8/4", "2 at once", "2 clients"} < set(measured.case)
    rate = measured[measured.figure == "rate_per_s"]
    highest = measured[(measured.case == "2 clients") & (measured.figure == "requests_per_s")]
    assert rate.slipway.item() == rate.vllm.item() == pytest.approx(0.5 * highest.vllm.item(), rel=1e-4)
    # transformers continued the same prompts for the stand-in, the drop-in engine for itself, from the same weights.
    assert rows[rows.case == "agreement"].ratio.item() == 1.0


def test_a_peer_that_fails_costs_its_own_figures_alone(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.csv"
    broken = peer(tmp_path / "peer", STAND_IN_FAILS="1")
    with pytest.raises(ServerError, match=r"vllm's offline part \(status 1\)"):
        few = [*SMALL, "--tensor-para-size=2", "--burst=0", '--parts=["offline"]']
        compare.main([f"--model={model}", f"--csv={table}", *few, *broken])
    assert "the stand-in was told to fail" in capfd.readouterr().err
    rows = pandas.read_csv(table)
    assert rows.slipway.notna().all() and rows.vllm.isna().all() and rows.ratio.isna().all()
    assert rows.slipway_settings.str.contains("2 shards").all()


def test_one_start_of_the_peer_gives_whole_answers_and_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [each for each in sys.modules if each.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(write_package(tmp_path / "peer"))
    monkeypatch.setenv("STAND_IN_COMMIT", "abc123")
    job = Job(
        parts=("offline", "online"), model="", is_made_up=False, shape="", checkpoint="", model_type="",
        data_type="fp32", kind="", tensor_para_size=1, vocab=9, longest=64, memory=0.5, kv_cache_bytes=0,
        rows=(1, 3), lengths=((5, 8),), repeats=1, burst=4, burst_lengths=((1, 3), (2, 7)), clients=2, requests=3,
        shares=(), rates_per_s=(), seconds=0.1, peer_settings=(), output=str(tmp_path / "found.jsonl"),
    )  # fmt: skip
    job.write(tmp_path / "job.json")
    vllm.main([f"--job={tmp_path / 'job.json'}"])
    found = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    cases = ["engine", "static 1 x 5/8", "static 3 x 5/8", "4 at once", "agreement", "2 clients"]
    assert [line["case"] for line in found] == cases


def test_a_kind_of_numbers_is_told_to_the_peer_or_refused(tmp_path: Path) -> None:
    made_up_model("GPT-OSS 20B", "bf16", tmp_path / "experts", "mxfp4")
    config = json.loads((tmp_path / "experts" / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "mxfp4"}
    with pytest.raises(ConfigError, match="--kind: there is no 'fp9'"):
        compare.main(["--kind=fp9"])
    with pytest.raises(ConfigError, match="--kind: there is no 'fp8'"):
        compare.main(["--kind=fp8", f"--model={tmp_path}"])


def test_made_up_weights_of_a_peer_in_fp8_spread_as_others_do() -> None:
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(64, 256, dtype=torch.float8_e4m3fn), requires_grad=False)
    model.weight_scale = torch.nn.Parameter(torch.ones(64, 1), requires_grad=False)
    model.input_layernorm_weight = torch.nn.Parameter(torch.zeros(8))
    make_weights_random(model)
    numbers = model.weight.float() * model.weight_scale
    assert numbers.isfinite().all() and numbers.std().item() == pytest.approx(0.02, rel=0.02)  # 3 standard errors
    assert (model.input_layernorm_weight == 1).all()


def test_both_engines_get_as_many_gpus_and_the_table_says_how_many(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    numbers = {each.name: 4 for each in fields(Job)}
    Job(**numbers | {"data_type": "fp16", "peer_settings": (), "output": ""}).write(path)  # type: ignore[arg-type]
    job = Job.read(path)
    assert engine_settings(job)["tensor_parallel_size"] == 4
    assert job.name_gpus("NVIDIA H200") == "4 x NVIDIA H200"
    assert replace(job, tensor_para_size=1).name_gpus("NVIDIA H200") == "NVIDIA H200"
