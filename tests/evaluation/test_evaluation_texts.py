"""Translation and summarization: BLEU and ROUGE against their packages, files, and the way through a server."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sacrebleu
from support.servers.fake_triton import T5_INPUTS, FakeTriton, RefusalError, Tensors
from tokenizers import ByteLevelBPETokenizer

from evaluation import summarization, translation
from evaluation.tasks.texts.pairs import Pair, join_pieces, read_pairs
from evaluation.tasks.texts.rouge import rouge_l, rouge_lsum, rouge_n
from evaluation.tasks.texts.run import Predictions, TextSample
from handover.errors import ConfigError, ServerError

DATA = Path(__file__).resolve().parents[1] / "data"
PROMPTS = Path(__file__).resolve().parents[2] / "evaluation" / "prompts"
ROUGE = json.loads((DATA / "rouge_score.json").read_text(encoding="utf-8"))
END = 0
PAIRS = [
    ("The cat sits on the mat.", "Die Katze sitzt auf der Matte."),
    ("It rains.", "Es regnet heute."),
    ("A good day to you.", "Einen guten Tag wünsche ich."),
]
BOOK = {  # what the model makes of each source
    "The cat sits on the mat.": "Die Katze sitzt auf der Matte.",
    "It rains.": "Es regnet.",
    "A good day to you.": "Einen guten Tag.",
}


@pytest.mark.parametrize("case", range(len(ROUGE)))
def test_rouge_is_that_of_the_package(case: int) -> None:
    """Computed by rouge-score 0.1.2 without stemming, some by hand and some on random words."""
    entry = ROUGE[case]
    texts = entry["prediction"], entry["reference"]
    found = [rouge_n(*texts, 1), rouge_n(*texts, 2), rouge_l(*texts), rouge_lsum(*texts)]
    assert found == pytest.approx([entry[name] for name in ("rouge1", "rouge2", "rougeL", "rougeLsum")])


def test_rouge_by_hand() -> None:
    """Prediction of 4 words, reference of 3: 2 words in common, no pair; the longest subsequence is one word."""
    given, gold = "red blue green green", "blue red white"
    assert rouge_n(given, gold, 1) == pytest.approx(4 / 7) and rouge_n(given, gold, 2) == 0.0
    assert rouge_l(given, gold) == pytest.approx(2 / 7)


class Writer:
    """A fake T5 that makes of a source what its book says."""

    def __init__(self, directory: Path, book: dict[str, str]) -> None:
        self.book, self.tokenizer = book, ByteLevelBPETokenizer()
        texts = [*book, *book.values(), "translate English to German: summarize: "]
        self.tokenizer.train_from_iterator(texts, vocab_size=400, special_tokens=["</s>"], show_progress=False)
        self.tokenizer.save_model(str(directory))
        (directory / "config.ini").write_text(
            f"[encoder]\nvocab_size = 400\n[decoder]\nvocab_size = 400\neos_token_id = {END}\n"
        )

    def write(self, prompt: str) -> list[int]:
        source = next(source for source in self.book if prompt.endswith(source))
        if self.book[source] == "!":
            raise RefusalError("out of memory")
        return [*self.tokenizer.encode(self.book[source]).ids, END]

    def answer(self, tensors: Tensors) -> Tensors:
        ids, lengths = tensors["input_ids"], tensors["sequence_length"][:, 0]
        wanted = int(tensors["max_output_len"].max())
        output, counts = np.zeros((len(ids), 1, wanted), np.int32), np.zeros((len(ids), 1), np.int32)
        for row, length in enumerate(lengths):
            assert ids[row, length - 1] == END
            tokens = self.write(self.tokenizer.decode(ids[row, : length - 1].tolist()))[:wanted]
            output[row, 0, : len(tokens)], counts[row] = tokens, len(tokens)
        return {"output_ids": output, "sequence_length": counts}

    def answer_text(self, tensors: Tensors) -> Tensors:
        written = [self.write(text.decode()) for (text,) in tensors["INPUT_0"]]
        texts = [self.tokenizer.decode(tokens[:-1]).encode() for tokens in written]
        lengths = np.array([[len(tokens)] for tokens in written], np.int32)
        return {"OUTPUT_0": np.array(texts, dtype=np.object_), "sequence_length": lengths}


def evaluate(
    main: Callable[[list[str]], None], directory: Path, book: dict[str, str] = BOOK, model: str = "fastertransformer"
) -> tuple[dict[str, Any], FakeTriton]:
    data = directory / "d.jsonl"
    data.write_text("".join(json.dumps({"source": s, "reference": r}) + "\n" for s, r in PAIRS), encoding="utf-8")
    writer = Writer(directory, book)
    is_text = model == "ensemble"
    given: dict[str, Any] = {"inputs": ("INPUT_0",), "passes_on": T5_INPUTS} if is_text else {"inputs": T5_INPUTS}
    parameters = {"model_checkpoint_path": str(directory)}
    name = "translation" if main is translation.main else "summarization"
    flags = [f"--data-path={data}", f"--prompt={PROMPTS}/{name}_t5.yaml", f"--model={model}", "--batch-size=2"]
    with FakeTriton(writer.answer_text if is_text else writer.answer, parameters=parameters, **given) as fake:
        main([f"--endpoint={fake.url}", f"--output={directory / 'out'}", *flags])
    content: dict[str, Any] = json.loads((directory / "out" / "metrics.json").read_text())
    return content, fake


@pytest.mark.parametrize("model", ["fastertransformer", "ensemble"])
def test_translations_have_the_bleu_of_fastertransformers_script(tmp_path: Path, model: str) -> None:
    """Its call: sacrebleu.corpus_bleu(predictions, [references], force=True)."""
    content, fake = evaluate(translation.main, tmp_path, model=model)
    predictions = [BOOK[source] for source, _ in PAIRS]
    expected = sacrebleu.corpus_bleu(predictions, [[reference for _, reference in PAIRS]], force=True)
    bleu, speed = content["metrics"]
    assert (bleu["name"], bleu["unit"], bleu["n"]) == ("bleu", "BLEU", 3)
    assert bleu["value"] == pytest.approx(expected.score) and 0 < expected.score < 100 and bleu["stderr"] > 0
    assert (tmp_path / "out" / "predictions.txt").read_text(encoding="utf-8").splitlines() == predictions
    with (tmp_path / "out" / "samples.csv").open(newline="", encoding="utf-8") as stream:
        tokens = sum(int(row["generated_tokens"]) for row in csv.DictReader(stream))
    assert speed["name"] == "tokens_per_s"
    assert speed["value"] == pytest.approx(tokens / content["settings"]["elapsed_s"])
    assert len(fake.requests) == 3, "the first is not timed: nothing is measured before an answer came back"
    assert "tok:13a" in content["settings"]["signature"]


def test_bleu_by_hand() -> None:
    """4 of 5 words, 3 of 4 pairs, 2 of 3 triples, 1 of 2 runs of four; as long as the reference."""
    samples = [TextSample(0, 1, 0, 5, "a b c d x", "")]
    metrics, _, _ = translation.score(Predictions([Pair("s", "a b c d e")], samples, 1))
    assert metrics[0].value == pytest.approx(100 * math.exp(sum(map(math.log, (4 / 5, 3 / 4, 2 / 3, 1 / 2))) / 4))
    assert metrics[0].stderr is None


def test_summaries_have_the_mean_rouge(tmp_path: Path) -> None:
    content, _ = evaluate(summarization.main, tmp_path)
    metrics = {metric["name"]: metric for metric in content["metrics"]}
    assert list(metrics) == ["rouge1", "rouge2", "rougeL", "rougeLsum", "tokens_per_s"]
    expected = [rouge_n(BOOK[source], reference, 1) for source, reference in PAIRS]
    assert metrics["rouge1"]["value"] == pytest.approx(sum(expected) / 3) and metrics["rouge1"]["unit"] == "fraction"


@pytest.mark.parametrize("main", [translation.main, summarization.main])
def test_a_failed_request_is_no_bad_text(main: Callable[[list[str]], None], tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"1 of 3 samples have no score; the first, number 3: .*out of memory"):
        evaluate(main, tmp_path, BOOK | {PAIRS[2][0]: "!"})
    content = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert {(metric["n"], metric["failed"]) for metric in content["metrics"]} == {(2, 1)}
    assert (tmp_path / "out" / "predictions.txt").read_text(encoding="utf-8").splitlines()[2] == ""


def test_two_files_are_paired_by_line(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("one\r\ntwo\u2028still two\n", encoding="utf-8")
    (tmp_path / "r").write_text("eins\nzwei", encoding="utf-8")
    pairs = read_pairs(tmp_path / "s", tmp_path / "r", None)
    assert pairs == [Pair("one", "eins"), Pair("two\u2028still two", "zwei")]
    assert read_pairs(tmp_path / "s", tmp_path / "r", 1) == pairs[:1]


def test_pieces_become_a_text() -> None:
    """Lines as in FasterTransformer's test.en and test.de."""
    assert join_pieces(["▁28", "-", "Y", "ear", "-", "O", "ld", "▁Chef", "▁Found", "</s>"]) == "28-Year-Old Chef Found"
    assert (
        join_pieces(["▁eines", "▁", "örtlich", "en", "▁Einkauf", "zentrum", "s"]) == "eines örtlichen Einkaufzentrums"
    )


@pytest.mark.parametrize(
    ("source", "reference", "samples", "words"),
    [
        ("a\nb\n", "a\n", None, "2 lines"),
        ("a\n", None, None, "line 1 is no object"),
        ('{"source": "a"}\n', None, None, "line 1 is no object"),
        ("", "", None, "has 0 texts"),
        ("a\n", "a\n", 2, "has 1 texts, but 2"),
    ],
)
def test_a_malformed_file_is_one_clear_error(
    tmp_path: Path, source: str, reference: str | None, samples: int | None, words: str
) -> None:
    (tmp_path / "s").write_text(source)
    if reference is not None:
        (tmp_path / "r").write_text(reference)
    with pytest.raises(ConfigError, match=words):
        read_pairs(tmp_path / "s", None if reference is None else tmp_path / "r", samples)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_pairs(tmp_path / "none", None, None)
