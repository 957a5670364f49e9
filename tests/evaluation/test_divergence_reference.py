"""The reference that is streamed layer by layer out of a checkpoint: kept, resumed, and said before how long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from support.tiny_models import huggingface_models, llama_models, peft_adapters

from backends.fastertransformer.engine.model.config import ModelConfig
from backends.fastertransformer.engine.model.weights import load_weights
from evaluation.divergence import stage, streamed
from evaluation.divergence.reference import open_reference
from evaluation.divergence.stage import LayeredModel, Numbers, Stage
from export_scripts.checkpoints.user_files import NOTHING_GIVEN, GivenFiles
from handover.errors import ConfigError
from handover.progress import Progress

YARN = {"rope_theta": 5e5, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
FP32 = Numbers()


def rows_of(vocab: int, *lengths: int) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(3)
    return [tuple(rng.integers(3, vocab, length).tolist()) for length in lengths]


def check_logits(
    checkpoint: Path, directory: Path, ids: npt.NDArray[np.int64], logits: npt.NDArray[np.float32], given: GivenFiles
) -> None:
    """Compare with logits [rows, T, V] that others computed."""
    reference = open_reference(checkpoint, directory, given)
    found = reference.scores([tuple(row) for row in ids.tolist()], logits.shape[-1], FP32)
    whole = torch.from_numpy(logits[:, :-1].astype(np.float64)).log_softmax(-1).flatten(0, 1).numpy()
    assert np.abs(np.take_along_axis(whole, found.top_ids.astype(int), 1) - found.top).max() < 1e-3
    reference.close()


def test_a_checkpoint_of_nemos_has_nemos_own_logits(tmp_path: Path) -> None:
    """The oracle is what NeMo 1.23 itself said of the sample."""
    sample = Path(__file__).resolve().parents[1] / "data" / "nemo" / "gpt_tp2_pp1"
    ids, logits = (np.load(f"{sample}.{what}.npy") for what in ("input_ids", "logits"))
    check_logits(sample.with_suffix(".nemo"), tmp_path, ids, logits, NOTHING_GIVEN)


def test_an_adapter_is_merged_as_peft_merges_it(tmp_path: Path) -> None:
    llama_models.save("llama", tmp_path / "source")
    logits = np.load(peft_adapters.DATA / "llama.logits.npy")
    given = GivenFiles(adapter=peft_adapters.DATA / "llama")
    check_logits(tmp_path / "source", tmp_path / "references", peft_adapters.INPUT_IDS, logits, given)
    with_it, without = (open_reference(tmp_path / "source", tmp_path, each) for each in (given, NOTHING_GIVEN))
    assert with_it.directory != without.directory


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    llama_models.save("llama", tmp_path / "source")
    return tmp_path / "source"


def test_a_killed_run_goes_on_behind_its_last_layer(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed in the middle of a layer, when some of the passages have been through it."""
    monkeypatch.setattr(stage, "BATCH_TOKENS", 20)
    rows = rows_of(llama_models.VOCAB, 20, 20, 20)
    reference = open_reference(llama, tmp_path / "references", NOTHING_GIVEN)
    whole = reference.scores(rows, 8, FP32)
    run, opened, calls = Stage.run, list[int](), list[int]()
    open_stage = LayeredModel.open

    def killed(self: Stage, given: Any, hidden: Any) -> Any:
        calls.append(1)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return run(self, given, hidden)

    def noted(self: LayeredModel, number: int, given: Any) -> Stage:
        opened.append(number)
        return open_stage(self, number, given)

    monkeypatch.setattr(Stage, "run", killed)
    again = open_reference(llama, tmp_path / "others", NOTHING_GIVEN)
    with pytest.raises(KeyboardInterrupt):
        again.scores(rows, 8, FP32)
    monkeypatch.setattr(Stage, "run", run)
    monkeypatch.setattr(LayeredModel, "open", noted)
    found = again.scores(rows, 8, FP32)
    assert opened[1] == 2  # behind what the estimate has opened: the embedding and the first layer were whole
    assert (found.top == whole.top).all() and (found.log_probs == whole.log_probs).all()
    opened.clear()
    assert (again.scores(rows, 8, FP32).top == whole.top).all() and not opened  # it is kept
    assert not list((tmp_path / "others").rglob("*.f32"))


@pytest.mark.parametrize("size", [0, 10])
def test_what_an_earlier_run_finished_says_nothing_of_the_rate(
    size: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Six of ten items, or their bytes, are there; one more takes a minute, so that three are left."""
    now = [0.0]
    monkeypatch.setattr("handover.progress.time.monotonic", lambda: now[0])
    with Progress("reference", 10, "layers", 10 * size) as progress:
        progress.skip(6 * size, items=6)
        now[0] = 60.0
        progress.advance(1, size)
    said = capsys.readouterr().err
    assert "7/10 layers" in said and "eta 0:03:00" in said


def test_another_checkpoint_has_another_reference(llama: Path, tmp_path: Path) -> None:
    first = open_reference(llama, tmp_path / "references", NOTHING_GIVEN)
    file = next(llama.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    second = open_reference(llama, tmp_path / "references", NOTHING_GIVEN)
    assert first.digest != second.digest and first.directory != second.directory


def test_one_layer_is_in_memory_at_a_time(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []

    def noted(*given: Any) -> Any:
        weights = load_weights(*given)
        held.append(weights.size_bytes)
        return weights

    monkeypatch.setattr(stage, "load_weights", noted)
    reference = open_reference(llama, tmp_path / "references", NOTHING_GIVEN)
    reference.scores(rows_of(llama_models.VOCAB, 9), 4, FP32)
    config: ModelConfig = reference.open(FP32).config
    whole = 4 * sum(int(np.prod(tensor.shape)) for tensor in config.tensors.values())
    assert len(held) == 1 + config.num_layer + 2 and max(held) < whole / 2  # one for the estimate


def test_what_it_takes_is_said_before(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a clock that loading a layer takes a minute of: for few tokens that is what a large model takes."""
    now, open_stage = [0.0], LayeredModel.open

    def clock() -> float:
        now[0] += 1e-3
        return now[0]

    def slow(self: LayeredModel, number: int, given: Any) -> Stage:
        now[0] += 60
        return open_stage(self, number, given)

    monkeypatch.setattr("evaluation.divergence.streamed.time.perf_counter", clock)
    monkeypatch.setattr(LayeredModel, "open", slow)
    reference = open_reference(llama, tmp_path / "references", NOTHING_GIVEN)
    reference.scores(rows_of(llama_models.VOCAB, 9), 4, FP32)
    said = capsys.readouterr().err
    stages = reference.open(FP32).config.num_layer + 2
    assert f"reference in fp32: about 0:0{stages}:00 for 9 tokens through {stages} of {stages} layers" in said
    left = streamed.estimate(reference.open(FP32), 9, 2)
    assert left.startswith(f"about 0:02:00 for 9 tokens through 2 of {stages} layers")
    assert left.endswith("of weights to load in 0:02:00)")


def test_a_network_that_the_engine_does_not_compute_is_refused_by_name(tmp_path: Path) -> None:
    import transformers

    config = transformers.T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4, vocab_size=64)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    huggingface_models.write_tokenizer(tmp_path / "t5")
    with pytest.raises(ConfigError, match="encoder-decoder"):
        open_reference(tmp_path / "t5", tmp_path / "references", NOTHING_GIVEN)
    llama_models.save("llama4", tmp_path / "llama4", rope_parameters=YARN)
    reference = open_reference(tmp_path / "llama4", tmp_path / "references", NOTHING_GIVEN)
    with pytest.raises(ConfigError, match="a factor of rotated queries and keys"):
        reference.open(FP32)
    model = llama_models.save("phi3", tmp_path / "longrope")
    reference = open_reference(tmp_path / "longrope", tmp_path / "references", NOTHING_GIVEN)
    most = model.config.rope_parameters["original_max_position_embeddings"]
    with pytest.raises(ConfigError, match=f"up to {most + 1} tokens, and the reference is computed up to {most}"):
        reference.scores(rows_of(llama_models.VOCAB, most + 1), 4, FP32)
