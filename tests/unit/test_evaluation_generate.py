"""The completion client against a fake server."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fake_triton import FakeTriton, Tensors, count_up
from tokenizers import ByteLevelBPETokenizer

from evaluation import generate
from handover.errors import ConfigError


def add_words(tensors: Tensors) -> Tensors:
    words = [text + b" and so on" for (text,) in tensors["INPUT_0"]]
    return {"OUTPUT_0": np.array(words, dtype=np.object_)}


def test_each_prompt_is_printed_with_its_completion(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeTriton(add_words, inputs=("INPUT_0",)) as fake:
        generate.main(["--prompts", "Thank you for", "Q: lunch?", "--endpoint", fake.url, "--output-len", "8"])
    assert capsys.readouterr().out == "> Thank you for\n and so on\n\n> Q: lunch?\n and so on\n"
    assert fake.requests[0]["INPUT_1"].tolist() == [[8], [8]]


def test_sampling_options_reach_the_server() -> None:
    options = ["--top-k", "5", "--top-p", "0.5", "--temperature", "0.25", "--random-seed", "3"]
    with FakeTriton(add_words, inputs=("INPUT_0",)) as fake:
        generate.main(["--prompts", "a", "--endpoint", fake.url, *options])
    (tensors,) = fake.requests
    sent = [tensors[name].item() for name in ("runtime_top_k", "runtime_top_p", "temperature", "random_seed")]
    assert sent == [5, 0.5, 0.25, 3]


def test_a_token_id_model_is_asked_through_the_tokenizer_beside_its_shards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(["a few words to learn"], vocab_size=270, show_progress=False)
    trained.save_model(str(tmp_path))
    (tmp_path / "config.ini").write_text("[gpt]\nvocab_size = 270\nmax_pos_seq_len = 32\n")
    with FakeTriton(count_up, parameters={"model_checkpoint_path": str(tmp_path)}) as fake:
        generate.main(["--prompts", "a", "--endpoint", fake.url, "--model", "fastertransformer", "--output-len", "2"])
    first = trained.encode("a").ids[0]
    expected = trained.decode([first + 1, first + 2])
    assert capsys.readouterr().out == f"> a\n{expected}\n"


def test_a_model_that_takes_neither_is_refused() -> None:
    with (
        FakeTriton(count_up, inputs=("pixels",)) as fake,
        pytest.raises(ConfigError, match="asked with text"),
    ):
        generate.main(["--prompts", "a", "--endpoint", fake.url])
