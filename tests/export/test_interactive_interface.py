"""The stateful store, against FasterTransformer backend's published one; both read by the official protobuf parser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format, text_format
from support.servers import beyond
from support.shards.ft_checkpoint_maker import DATA, make_ft_checkpoint
from tritonclient.grpc import model_config_pb2

from export_scripts.arguments import ExportArguments
from export_scripts.repository.model_repository import build_repository

PUBLISHED = json.loads((DATA / "ft_backend_stores.json").read_text())["gpt-interactive-text-generation"]


def export(directory: Path, sessions: int, decoupled: bool = False) -> dict[str, dict[str, Any]]:
    checkpoint, output = make_ft_checkpoint(directory / "1-gpu"), directory / "model_repo"
    build_repository(
        ExportArguments(
            checkpoint, output, "tiny", 1, 1, "fp32", 0, 0, max_batch_size=8, decoupled=decoupled,
            interactive_sessions=sessions, session_idle_s=60,
        )
    )  # fmt: skip
    return {
        path.parent.name: json_format.MessageToDict(
            text_format.Parse(path.read_text(), model_config_pb2.ModelConfig()), preserving_proto_field_name=True
        )
        for path in output.glob("*/config.pbtxt")
    }


def by_name(config: dict[str, Any], side: str) -> dict[str, Any]:
    return {entry["name"]: entry for entry in config[side]}


@pytest.mark.parametrize("sessions", [1, 3])
def test_a_client_of_the_published_store_is_a_client_of_ours(tmp_path: Path, sessions: int) -> None:
    ours = export(tmp_path, sessions)
    added = {
        "fastertransformer": {"is_return_context_cum_log_probs", "is_return_context_embeddings",
                              "response_input_lengths", "context_embeddings", "is_return_context_log_probs",
                              "context_log_probs", "context_argmax_ids", "presence_penalty", "min_length",
                              *beyond.INPUTS, *beyond.OUTPUTS},
        "ensemble": {"is_return_context_cum_log_probs", "is_return_context_log_probs", "context_log_probs",
                     "context_argmax_ids", "presence_penalty", "min_length", *beyond.INPUTS, *beyond.OUTPUTS},
        "postprocessing": {"RESPONSE_INPUT_LENGTHS", "SEQUENCE_LENGTH"},
    }  # fmt: skip
    made_optional = {"BAD_WORDS_DICT", "STOP_WORDS_DICT", "INPUT_2", "INPUT_3"}
    for model, published in PUBLISHED.items():
        assert int(ours[model]["max_batch_size"]) == published["max_batch_size"] == 1
        for side in ("input", "output"):
            mine, theirs = by_name(ours[model], side), by_name(published, side)
            assert mine.keys() - theirs.keys() <= added.get(model, set())
            for name, entry in theirs.items():
                assert mine[name] == entry | ({"optional": True} if name in made_optional else {})
    wanted = PUBLISHED["fastertransformer"]["sequence_batching"]
    batching = ours["fastertransformer"]["sequence_batching"]
    if sessions == 1:
        assert batching == wanted
    else:
        assert batching.pop("oldest") == {"max_candidate_sequences": 3}
        assert batching == {key: value for key, value in wanted.items() if key != "direct"}
    assert not {"dynamic_batching", "batch_input"} & ours["fastertransformer"].keys()


def test_session_lengths_reach_the_engine_through_the_ensembles(tmp_path: Path) -> None:
    ours = export(tmp_path, 2, decoupled=True)
    assert ours["fastertransformer"]["model_transaction_policy"]["decoupled"]
    for model in ("ensemble", "tiny"):
        steps = {step["model_name"]: step for step in ours[model]["ensemble_scheduling"]["step"]}
        for name in ("session_len", "memory_len"):
            assert steps["fastertransformer"]["input_map"][name] == name
            assert by_name(ours[model], "input")[name] == {
                "name": name, "data_type": "TYPE_UINT32", "dims": ["-1", "1"], "optional": True,
            }  # fmt: skip
        assert "sequence_batching" not in ours[model]
    assert "session_len" not in by_name(ours["preprocessing"], "input")
