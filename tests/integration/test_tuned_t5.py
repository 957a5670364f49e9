"""A p-tuned T5 of NeMo's from its two archives to SQuAD's figures, through the real tritonserver."""

from __future__ import annotations

import configparser
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints.nemo_archive import write_nemo
from support.measurements.task_runs import OUTPUT_LEN, SQUAD, TEMPLATE, Run, answers
from support.tiny_models.t5_models import (
    HEADS,
    WIDTH,
    Saving,
    huggingface_t5,
    nemo_states,
    plain_from_huggingface,
    relative_config,
)
from transformers import BertTokenizerFast

from evaluation.tasks.squad.data import read_dataset
from handover.errors import ConfigError

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TABLES = {
    name: torch.from_numpy(np.random.default_rng(seed).normal(0, 0.5, (rows, WIDTH)).astype(np.float16)).float()
    for seed, (name, rows) in enumerate({"other": 4, "squad": 3}.items())
}
# As NeMo's T5 is tuned: learnt tokens before and behind the passage too.
TEMPLATES = [
    TEMPLATE | {"taskname": "other", "total_virtual_tokens": 4, "virtual_token_splits": [4]},
    TEMPLATE
    | {
        "prompt_template": "<|VIRTUAL_PROMPT_0|> {context} <|VIRTUAL_PROMPT_1|> {question} {answer}",
        "virtual_token_splits": [2, 1],
    },
]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Run, Any, BertTokenizerFast]]:
    root = tmp_path_factory.mktemp("tuned_t5")
    (root / "source").mkdir()
    characters = sorted(set(SQUAD.read_text("utf-8")) - set(" \n"))
    vocabulary = "\n".join([*SPECIAL, *characters, *(f"##{each}" for each in characters)])
    (root / "vocab.txt").write_text(vocabulary, encoding="utf-8")
    tokenizer = BertTokenizerFast(str(root / "vocab.txt"), do_lower_case=False)
    padded = -(-len(tokenizer) // 128) * 128  # as Megatron pads
    model = huggingface_t5(
        is_multilingual=True, vocab_size=padded, feed_forward_proj="gated-gelu", num_decoder_layers=4
    )
    states = nemo_states(plain_from_huggingface(model), HEADS, Saving())
    files = {"vocab.txt": vocabulary.encode()}
    write_nemo(root / "source" / "t5.nemo", relative_config(Saving(), "geglu"), states, files=files)
    tables = {f"prompt_table.{name}.prompt_embeddings.weight": table for name, table in TABLES.items()}
    config = {
        "target": "nemo.collections.nlp.models.language_modeling.megatron_t5_prompt_learning_model."
        "MegatronT5PromptLearningModel",
        "virtual_prompt_style": "p-tuning",
        "task_templates": TEMPLATES,
    }
    write_nemo(root / "source" / "tuned.nemo", config, {"model_weights.ckpt": {"prompt_table": tables}}, files={})
    run = Run(root, root / "source", "export=t5/export_t5", "export.run.results_dir=${base_results_dir}/tiny/results")
    yield run, model, tokenizer
    run.deployment.begin_to_stop()


def written(model: Any, embeddings: torch.Tensor, start_id: int, end_id: int) -> list[int]:
    """What Hugging Face's T5 answers greedily to given embeddings, [T, hidden]."""
    with torch.no_grad():
        tokens: list[int] = model.generate(
            inputs_embeds=embeddings[None],
            decoder_start_token_id=start_id, eos_token_id=end_id, max_new_tokens=OUTPUT_LEN, do_sample=False,
            use_cache=False,
        )[0, 1:].tolist()  # fmt: skip
    return [token for token in tokens if token != end_id]


def test_a_p_tuned_t5_answers_with_its_table_however_it_is_asked(
    tuned: tuple[Run, Any, BertTokenizerFast], tmp_path: Path
) -> None:
    """Oracle: Hugging Face's T5 on the table's rows and the tokens of the template, filled in by hand."""
    run, model, tokenizer = tuned
    named = answers(run, tmp_path / "named", "--taskname=squad", "--samples=3")
    metrics = json.loads((tmp_path / "named" / "metrics.json").read_text())
    assert (metrics["samples"], metrics["failed"]) == (3, 0)
    embedded = ("--taskname=squad", "--samples=3", "--use-request-prompt-embedding=true")
    assert answers(run, tmp_path / "brought", *embedded) == named
    ini = configparser.ConfigParser()
    ini.read(next(run.results.glob("model_repo/fastertransformer/1/*-gpu/config.ini")))
    start_id, end_id = (ini["decoder"].getint(key) for key in ("decoder_start_token_id", "eos_token_id"))
    assert end_id == tokenizer.sep_token_id
    shared, table = model.shared.weight.detach(), TABLES["squad"]
    for question in read_dataset(SQUAD, 3).questions:
        context, asked = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (
            question.context, question.question,
        ))  # fmt: skip
        embeddings = torch.cat((table[:2], shared[context], table[2:], shared[[*asked, end_id]]))
        tokens = written(model, embeddings, start_id, end_id)
        assert named[question.id] == tokenizer.decode(tokens, clean_up_tokenization_spaces=False).strip()
    assert answers(run, tmp_path / "other", "--taskname=other", "--samples=3") != named  # the table matters


def test_learnt_tokens_are_no_texts(tuned: tuple[Run, Any, BertTokenizerFast], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="take model=fastertransformer"):
        answers(tuned[0], tmp_path, "--taskname=squad", "--model=ensemble")
