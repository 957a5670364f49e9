"""docs/shown.md is made from the cases that the tests of conversions run; every architecture has a row."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import test_delta_rule  # type: ignore[import-not-found]
import test_hybrids  # type: ignore[import-not-found]
import test_megatron_fsdp  # type: ignore[import-not-found]
import torch
import transformers
from support.llama_models import MODELS
from test_huggingface_target import MODELS as OLDER  # type: ignore[import-not-found]
from test_huggingface_target import T5S
from test_llama_huggingface import CASES  # type: ignore[import-not-found]
from test_megatron_bridge import LLAMAS, NEWER  # type: ignore[import-not-found]

from export_scripts.checkpoints.huggingface.decoder import ARCHITECTURES

PAGE = Path(__file__).resolve().parents[2] / "docs/shown.md"
BEGIN, END = "<!-- made by make golden from the cases of the tests: begin -->\n", "<!-- end -->"
TENSORS, BOTH, LOGITS = "tensors", "tensors; logits, 1e-5", "logits, 1e-5"


class Shown(NamedTuple):
    """One case: transformers' model_type, the source's form, the training's ranks, the type, what is compared."""

    model_type: str
    form: str
    ranks: int
    data_type: str
    compared: str


def shown() -> Iterator[Shown]:
    """List the cases of all tests."""
    for name in MODELS:
        yield Shown(_type_of(name), "Hugging Face", 1, "bf16", TENSORS)
    for family, _ in OLDER.values():
        for data_type in ("fp32", "bf16"):
            yield Shown(family, "Hugging Face", 1, data_type, "tensors; logits, equal")
    for _ in T5S:
        yield Shown("t5", "Hugging Face", 1, "fp32", "tensors; logits, 1e-6")
    for case in CASES:
        yield Shown(_type_of(case.name), _form(case.form), case.tensor, _short(case.dtype), BOTH)
    of_states = (test_hybrids.test_the_same_model_comes_out, test_delta_rule.test_the_same_model_comes_out)
    for name, form, ranks, dtype in chain.from_iterable(map(_cases, of_states)):
        yield Shown(_type_of(name), _form(form), ranks, _short(dtype), BOTH)
    for name in (*LLAMAS, *NEWER):
        yield Shown(_type_of(name), "Megatron-Bridge", 2, "fp32", LOGITS)
    for name, ranks in _cases(test_megatron_fsdp.test_megatron_bridges):
        yield Shown(_type_of(name), "Megatron-Bridge, fsdp_dtensor", ranks, "bf16", TENSORS)
    for name, ranks, dtype in _cases(test_megatron_fsdp.test_megatron_lms):
        yield Shown(_type_of(name), "Megatron-LM, fsdp_dtensor", ranks, _short(dtype), TENSORS)


def _cases(test: Any) -> list[tuple[Any, ...]]:
    return list(test.pytestmark[0].args[1])


def _type_of(name: str) -> str:
    return str(getattr(transformers, f"{MODELS[name][0]}Config").model_type)


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]


def _form(words: str) -> str:
    """Name the form as docs/sources.md does; how layers, experts and gates are stored is the tests' matter."""
    parts = words.split(", ")
    if parts[0] in ("legacy", "core", "zarr", "torch_dist"):
        return f"NeMo 1, {parts[0]}"
    name = "Megatron-Bridge" if parts[0] == "Bridge" else parts[0]
    return ", ".join([name, *(each for each in ("torch_dist", "fsdp_dtensor") if each in parts)])


def table() -> str:
    """Render one row for each architecture, form and comparison."""
    rows: dict[tuple[str, str, str], list[Shown]] = {}
    for case in shown():
        rows.setdefault((case.model_type, case.form, case.compared), []).append(case)
    lines = ["| `model_type` | source | ranks | types | compared |", "|---|---|---|---|---|"]
    for (model_type, form, compared), cases in sorted(rows.items()):
        ranks = ", ".join(str(number) for number in sorted({case.ranks for case in cases}))
        types = ", ".join(sorted({case.data_type for case in cases}))
        lines.append(f"| `{model_type}` | {form} | {ranks} | {types} | {compared} |")
    return BEGIN + "\n" + "\n".join(lines) + "\n\n"


def test_the_page_has_the_cases_of_now(request: pytest.FixtureRequest) -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    page = before + table() + END + rest.partition(END)[2]
    if request.config.getoption("--rewrite-golden"):
        PAGE.write_text(page)
    assert PAGE.read_text() == page, "run make golden"
    assert "| `llama` | Megatron-LM, torch_dist | 4 | bf16 | tensors; logits, 1e-5 |" in page


def test_every_architecture_has_a_row() -> None:
    missing = {"t5", *(each.model_type for each in ARCHITECTURES)} - {case.model_type for case in shown()}
    assert not missing, "its conversion is compared with nothing"
