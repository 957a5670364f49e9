"""config.ini and shards: what is read, and what is refused by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.shards.gpt2_checkpoint import random_gpt2, write_shards
from support.shards.llama_shards import settings_of
from transformers import GPT2LMHeadModel

from backends.fastertransformer.engine.engine import open_engine
from backends.fastertransformer.engine.errors import ConfigIniError, EngineError, WeightsError
from backends.fastertransformer.engine.model import weights as weights_module
from backends.fastertransformer.engine.model.families import read_config
from backends.fastertransformer.engine.model.precision import choose_device, choose_precision
from backends.fastertransformer.engine.settings import Settings

CPU = torch.device("cpu")
PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def gpt2() -> GPT2LMHeadModel:
    return random_gpt2()


def test_config_ini_as_fastertransformers_converter_writes_it(tmp_path: Path) -> None:
    (tmp_path / "config.ini").write_text(
        "[gpt]\nmodel_name = gpt\ntensor_para_size = 2\nhead_num = 4\nsize_per_head = 16\ninter_size = 256\n"
        "num_layer = 4\nmax_pos_seq_len = 32 ;for position embedding tables\nweight_data_type = fp16\n"
        "vocab_size = 1024\nstart_id = 0\nend_id = 0\n\n"
    )
    config = read_config(tmp_path)
    assert (config.hidden_units, config.max_pos_seq_len, config.weight_data_type) == (64, 32, "fp16")
    assert (config.layernorm_eps, config.tensor_para_size) == (1e-6, 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head_num": None}, "no head_num"),
        ({"num_layer": "three"}, "num_layer = three"),
        ({"vocab_size": 0}, "vocab_size = 0"),
        ({"weight_data_type": "int4"}, "weight_data_type = int4"),
        ({"layernorm_eps": "small"}, "layernorm_eps = small"),
        ({"activation_type": "swish"}, "activation_type = swish"),
        ({"activation_type": "GeGLU"}, "activation_type = GeGLU"),
        ({"layernorm_type": "sandwich"}, "layernorm_type = sandwich"),
        ({"use_attention_linear_bias": "1"}, "use_attention_linear_bias = 1"),
        ({"has_positional_encoding": "maybe"}, "has_positional_encoding = maybe"),
        ({"prompt_learning_type": "7"}, "prompt_learning_type = 7"),
        ({"has_adapters": "True"}, "has_adapters = True"),
    ],
)
def test_a_config_ini_that_does_not_fit_is_refused_by_key(
    gpt2: GPT2LMHeadModel, tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    directory = write_shards(gpt2, tmp_path, **changes)
    with pytest.raises(ConfigIniError, match=words):
        open_engine(Settings(directory, 1, 1, "fp32", cpu_threads=1), CPU)


def test_a_key_that_is_nearly_a_known_one_is_said(
    gpt2: GPT2LMHeadModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = write_shards(gpt2, tmp_path)
    read_config(directory)
    assert not caplog.records  # model_name and other keys that are not read count as none
    with (directory / "config.ini").open("a") as ini:
        ini.write("\nactivation_typ = relu\n")
    assert read_config(directory).activation == "gelu"
    (said,) = (record.getMessage() for record in caplog.records)
    assert said == f"{directory / 'config.ini'}: [gpt] activation_typ is ignored: did you mean activation_type?"


def test_a_missing_config_ini_or_section_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigIniError, match=r"config\.ini"):
        read_config(tmp_path)
    (tmp_path / "config.ini").write_text("[gptj]\nhead_num = 1\n")
    with pytest.raises(ConfigIniError, match=r"\[gpt\].*gptj"):
        read_config(tmp_path)


def test_every_unusable_shard_is_named(gpt2: GPT2LMHeadModel, tmp_path: Path) -> None:
    directory = write_shards(gpt2, tmp_path, 2)
    gone = "model.layers.1.attention.query_key_value.weight.1.bin"
    short = "model.layers.2.mlp.dense_4h_to_h.weight.0.bin"
    long = "model.wpe.bin"
    (directory / gone).unlink()
    (directory / short).write_bytes((directory / short).read_bytes()[:-4])
    (directory / long).write_bytes((directory / long).read_bytes() + b"\0\0\0\0")
    with pytest.raises(WeightsError) as caught:
        open_engine(Settings(directory, 2, 1, "fp32", cpu_threads=1), CPU)
    message = str(caught.value)
    assert message.startswith("3 shards")
    assert f"{gone}: No such file" in message
    assert f"{short}: {64 * 32 * 4 - 4} bytes, expected {64 * 32 * 4} for [64, 32]" in message
    assert long in message


def test_shards_of_another_type_than_config_ini_says_are_refused(gpt2: GPT2LMHeadModel, tmp_path: Path) -> None:
    directory = write_shards(gpt2, tmp_path, 1, "fp16", weight_data_type="fp32")
    with pytest.raises(WeightsError, match=r"model\.wte\.bin"):
        open_engine(Settings(directory, 1, 1, "fp32", cpu_threads=1), CPU)


@pytest.mark.parametrize(("tensor_para_size", "words"), [(1, "written for 2"), (3, "written for 2")])
def test_a_tensor_para_size_that_is_not_the_shards_is_refused(
    gpt2: GPT2LMHeadModel, tmp_path: Path, tensor_para_size: int, words: str
) -> None:
    with pytest.raises(WeightsError, match=words):
        open_engine(Settings(write_shards(gpt2, tmp_path, 2), tensor_para_size, 1, "fp32", cpu_threads=1), CPU)


def test_a_tensor_para_size_that_does_not_divide_the_heads_is_refused(gpt2: GPT2LMHeadModel, tmp_path: Path) -> None:
    directory = write_shards(gpt2, tmp_path, 1, tensor_para_size=None)
    with pytest.raises(WeightsError, match="does not divide head_num = 4"):
        open_engine(Settings(directory, 3, 1, "fp32", cpu_threads=1), CPU)


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "qwen3"])
def test_the_engine_keeps_its_own_copy_of_the_weights(name: str, gpt2: GPT2LMHeadModel, tmp_path: Path) -> None:
    """Shards may be swapped under a running server. A Gemma's head is tied, and all its norms are other numbers."""
    settings = Settings(write_shards(gpt2, tmp_path), 1, 1, "fp32", cpu_threads=1)
    settings = settings if name == "gpt2" else settings_of(name, tmp_path / name)[1]
    engine = open_engine(settings, CPU)
    ones = np.ones((1, 1), np.uint32)
    tensors = {"input_ids": np.full((1, 4), 5, np.uint32), "input_lengths": 4 * ones, "request_output_len": 6 * ones}
    before = engine.generate([engine.parse(tensors)])[0]["output_ids"].tolist()
    shards = [*settings.checkpoint.glob("*.bin"), *settings.checkpoint.glob("*.safetensors")]
    assert shards
    for shard in shards:
        shard.write_bytes(b"")
    assert engine.generate([engine.parse(tensors)])[0]["output_ids"].tolist() == before


def test_precision_is_said_and_unknown_ones_are_refused() -> None:
    assert choose_precision("fp32", CPU).compute == torch.float32
    half = choose_precision("fp16", CPU)
    assert (half.rounded, half.compute) == (torch.float16, torch.float32)
    assert "arithmetic in fp32" in half.note
    assert choose_precision("bf16", torch.device("cuda")).compute == torch.bfloat16
    with pytest.raises(EngineError, match="data_type = int8"):
        choose_precision("int8", CPU)


def test_the_device_is_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("CPU", 0) == torch.device("cuda", 0)  # as FasterTransformer's config.pbtxt has it
    assert choose_device("GPU", 1) == torch.device("cuda", 1)
    with pytest.raises(EngineError, match="GPU 2; this machine has 2"):
        choose_device("GPU", 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("CPU", 0) == CPU
    with pytest.raises(EngineError, match="has 0"):
        choose_device("KIND_GPU", 0)


def test_a_checkpoint_that_does_not_fit_is_refused_with_the_numbers_before_it_is_read(
    gpt2: GPT2LMHeadModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_shards(gpt2, tmp_path)
    read: list[str] = []
    from_file = torch.from_file
    monkeypatch.setattr(torch, "from_file", lambda path, **how: read.append(path) or from_file(path, **how))
    config, precision = read_config(directory), choose_precision("fp32", CPU)
    weights = weights_module.load_weights(directory, config, 1, precision, CPU)
    kept = sum(parameter.numel() * 4 for parameter in gpt2.parameters()) + 97 * 32 * 4  # the head in a form of its own
    assert weights.size_bytes == kept
    room = kept + 2 * (32 * 128 + 128) * 4  # and the largest matrix twice, while it is read
    monkeypatch.setattr(weights_module, "free_bytes", lambda device: room)
    assert weights_module.load_weights(directory, config, 1, precision, CPU).size_bytes == kept
    read.clear()
    monkeypatch.setattr(weights_module, "free_bytes", lambda device: room)
    with pytest.raises(WeightsError, match=r"takes 0\.000217 GB and cpu has 0\.000109 GB free for each of 2 processes"):
        weights_module.load_weights(directory, config, 1, precision, CPU, sharers=2)
    assert not read


def test_loading_takes_little_memory_beyond_the_weights(tmp_path: Path) -> None:
    """In a process of its own: the peak is the weights and a few of the largest tensor, not all of it twice."""
    gpt2 = random_gpt2(n_embd=256, n_layer=12, n_head=4)
    directory = write_shards(gpt2, tmp_path)
    program = (
        "import sys, torch\n"
        "from pathlib import Path\n"
        "from backends.fastertransformer.engine.model.families import read_config\n"
        "from backends.fastertransformer.engine.model.precision import choose_precision\n"
        "from backends.fastertransformer.engine.model.weights import load_weights\n"
        "torch.set_num_threads(1)\n"
        "torch.nn.functional.linear(torch.ones(2, 8), torch.ones(8, 8))\n"
        "def anonymous():\n"
        "    status = Path('/proc/self/status').read_text()\n"
        "    return int(status.split('RssAnon:')[1].split()[0]) * 1024\n"
        "before = anonymous()\n"
        "cpu = torch.device('cpu')\n"
        "directory = Path(sys.argv[1])\n"
        "weights = load_weights(directory, read_config(directory), 1, choose_precision('fp32', cpu), cpu)\n"
        "print(weights.size_bytes, anonymous() - before)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, str(directory)], capture_output=True, text=True, check=True, cwd=PROJECT
    )
    size_bytes, grown_bytes = map(int, run.stdout.split())
    assert 37e6 < size_bytes < 39e6
    assert grown_bytes < 1.3 * size_bytes + 8e6
