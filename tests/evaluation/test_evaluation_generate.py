"""The completion client against a fake server."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.servers.fake_triton import FakeTriton, Tensors, count_up
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


def letter_by_letter(tensors: Tensors) -> list[Tensors]:
    """The prompt and then, one more each time, the letters of "été!"; what was said before comes first."""
    (prompt,) = tensors["INPUT_0"].reshape(-1)
    texts = [prompt.decode() + "été!"[:count] for count in range(1, 5)]
    return [{"OUTPUT_0": np.array([text.encode()], dtype=np.object_)} for text in texts]


def test_text_is_printed_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr("sys.stdout.write", written.append)
    with FakeTriton(letter_by_letter, inputs=("INPUT_0",)) as fake:
        generate.main(["--stream", "--prompts", "un", "deux", "--endpoint", fake.url])
    assert "".join(written) == "> un\nété!\n> deux\nété!\n"
    assert [written.count(letter) for letter in "ét!"] == [4, 2, 2]


class Remembering:
    """A stateful model: it answers all that was said so far and one letter more for each letter of the prompt."""

    def __init__(self) -> None:
        self.text = ""

    def __call__(self, tensors: Tensors) -> list[Tensors]:
        (prompt,) = tensors["INPUT_0"].reshape(-1)
        self.text += prompt.decode()
        answers = []
        for _ in prompt.decode():
            self.text += "."
            answers.append({"OUTPUT_0": np.array([self.text.encode()], dtype=np.object_)})
        return answers


SESSION_INPUTS = ("INPUT_0", "session_len", "memory_len")


def test_a_conversation_is_one_sequence_of_turns(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeTriton(Remembering(), inputs=SESSION_INPUTS) as fake:
        generate.main(["--session", "--stream", "--prompts", "ab", "c", "de", "--endpoint", fake.url])
    assert capsys.readouterr().out == "> ab\n..\n> c\n.\n> de\n..\n"
    assert len({parameters["sequence_id"] for parameters in fake.sequences}) == 1
    places = [(turn["sequence_start"], turn["sequence_end"]) for turn in fake.sequences]
    assert places == [(True, False), (False, False), (False, True)]
    assert [tensors.get("session_len") is not None for tensors in fake.requests] == [True, False, False]
    first = fake.requests[0]
    assert first["session_len"].tolist() == first["memory_len"].tolist() == [[[1024]]]
    assert first["INPUT_0"].shape == first["INPUT_1"].shape == first["runtime_top_k"].shape == (1, 1, 1)


def test_a_conversation_reads_its_prompts_from_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", iter(["ab\n", "c\n"]))
    options = ["--session", "tea", "--session-len", "64", "--memory-len", "16"]
    with FakeTriton(Remembering(), inputs=SESSION_INPUTS) as fake:
        generate.main([*options, "--endpoint", fake.url])
    assert capsys.readouterr().out == "> ab\n..\n> c\n.\n"
    assert [parameters["sequence_id"] for parameters in fake.sequences] == ["tea", "tea"]
    assert [fake.requests[0][name].item() for name in ("session_len", "memory_len")] == [64, 16]


def test_a_model_without_state_holds_no_conversation() -> None:
    with (
        FakeTriton(add_words, inputs=("INPUT_0",)) as fake,
        pytest.raises(ConfigError, match="keeps no conversations"),
    ):
        generate.main(["--session", "--prompts", "a", "--endpoint", fake.url])
