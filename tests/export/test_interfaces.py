"""Stores of the other families against FasterTransformer backend's published ones, read by the official parser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import json_format, text_format
from support.servers import beyond
from support.shards.ft_checkpoint_maker import DATA, make_ft_checkpoint, seal
from tritonclient.grpc import model_config_pb2

from export_scripts.arguments import ExportArguments
from export_scripts.repository.model_repository import build_repository
from export_scripts.repository.tokenizer_models.slipway_tokenizer import decode_rows, encode_prompts, load_tokenizer
from handover.errors import ArtefactError

PUBLISHED = json.loads((DATA / "ft_backend_stores.json").read_text())
OURS = {"is_return_context_cum_log_probs", "is_return_context_log_probs", "context_log_probs", "context_argmax_ids"}
OURS |= {"presence_penalty", "min_length", *beyond.INPUTS, *beyond.OUTPUTS}
T5_OURS = {"decoder_input_ids", "decoder_input_lengths"}
BUILD = ("name", "backend", "default_model_filename", "max_batch_size", "instance_group", "parameters")


def export(directory: Path, config: str, interactive_sessions: int = 0) -> dict[str, dict[str, Any]]:
    """Export shards under another family's config.ini and read every configuration."""
    checkpoint, output = make_ft_checkpoint(directory / "1-gpu"), directory / "model_repo"
    (checkpoint / "config.ini").write_text(config)
    (checkpoint / "manifest.json").unlink()
    seal(checkpoint)
    build_repository(
        ExportArguments(checkpoint, output, "tiny", 1, 1, "fp32", 0, 0, 8, interactive_sessions=interactive_sessions)
    )
    return {
        path.parent.name: json_format.MessageToDict(
            text_format.Parse(path.read_text(), model_config_pb2.ModelConfig()), preserving_proto_field_name=True
        )
        for path in output.glob("*/config.pbtxt")
    }


def decoder(section: str) -> str:
    return f"[{section}]\nstart_id = 3\nend_id = 4\ntensor_para_size = 1\n"


T5 = "[encoder]\nnum_layers = 1\n[decoder]\ndecoder_start_token_id = 0\neos_token_id = 1\n"


def tensors(config: dict[str, Any], side: str) -> dict[str, Any]:
    return {entry["name"]: {**entry, "allow_ragged_batch": False} for entry in config[side]}


@pytest.mark.parametrize(
    ("family", "config"), [*((name, decoder(name)) for name in ("gptj", "gptneox", "llama")), ("t5", T5)]
)
def test_a_client_of_the_published_store_is_a_client_of_ours(tmp_path: Path, family: str, config: str) -> None:
    ours, published = export(tmp_path, config)["fastertransformer"], PUBLISHED[family]["fastertransformer"]
    assert ours["parameters"]["model_type"] == published["parameters"]["model_type"]
    for side in ("input", "output"):
        mine, theirs = tensors(ours, side), tensors(published, side)
        assert {name: mine[name] for name in theirs} == theirs
        added = mine.keys() - theirs.keys()
        assert all(ours[side][list(mine).index(name)].get("optional") for name in added if side == "input")
        wanted = beyond.INPUTS if side == "input" else beyond.OUTPUTS
        last = {entry["name"]: (entry["data_type"], entry["dims"]) for entry in ours[side][-len(wanted) :]}
        assert last == wanted  # behind all that FasterTransformer has
        # FasterTransformer reads a prompt's embedding for these families too (GptJTritonModelInstance.cc).
        legal = {"request_prompt_embedding", "request_prompt_lengths", "request_prompt_type"}
        assert added <= OURS | (T5_OURS if family == "t5" else legal)


@pytest.mark.parametrize("config", [decoder("gptj"), decoder("gptneox"), T5], ids=["gptj", "gptneox", "t5"])
def test_every_tensor_of_an_ensemble_has_a_source_of_its_type(tmp_path: Path, config: str) -> None:
    models = export(tmp_path, config)
    # Triton takes an ensemble's tensors for one name space, and T5 has sequence_length as an input and as an output.
    ensembles = ("ensemble",) if config == T5 else ("ensemble", "tiny")
    assert set(models) == {"fastertransformer", "preprocessing", "postprocessing", *ensembles}
    for ensemble in (models[name] for name in ensembles):
        known = {entry["name"]: entry["data_type"] for entry in ensemble["input"]}
        for step in ensemble["ensemble_scheduling"]["step"]:
            inputs, outputs = (tensors(models[step["model_name"]], side) for side in ("input", "output"))
            required = {key for key, entry in inputs.items() if not entry.get("optional")}
            assert required <= step["input_map"].keys()
            for tensor, source in step["input_map"].items():
                assert inputs[tensor]["data_type"] == known[source], (step["model_name"], tensor)
            assert not known.keys() & set(step["output_map"].values())
            known |= {target: outputs[tensor]["data_type"] for tensor, target in step["output_map"].items()}
        assert {entry["name"]: entry["data_type"] for entry in ensemble["output"]}.items() <= known.items()


def test_ids_of_t5_come_from_the_decoders_section(tmp_path: Path) -> None:
    parameters = export(tmp_path, T5)["preprocessing"]["parameters"]
    assert {key: value["string_value"] for key, value in parameters.items()} == {
        "start_id": "0", "end_id": "1", "ends_inputs": "1", "max_text_bytes": "1048576",
    }  # fmt: skip


def test_an_encoders_input_ends_and_its_answer_holds_no_input(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_ft_checkpoint(tmp_path / "1-gpu"))
    ids, lengths = encode_prompts(tokenizer, ["the", ""], start_id=7, end_id=0, ends_inputs=True)
    assert ids[0].tolist() == [*tokenizer.encode("the"), 0] and ids[1, 0] == 0
    assert lengths.tolist() == [[len(tokenizer.encode("the")) + 1], [1]]
    row = [*tokenizer.encode("or"), 0, 0]
    assert decode_rows(tokenizer, ids[None, :1] * 0 + 1, None, None, 0) == [tokenizer.decode([1] * ids.shape[1])]

    assert decode_rows(tokenizer, np.array([[row]]), None, np.array([[len(row) - 1]]), 0) == ["or"]


def test_sessions_are_for_decoders(tmp_path: Path) -> None:
    stateful = export(tmp_path / "llama", decoder("llama"), interactive_sessions=2)["fastertransformer"]
    assert stateful["sequence_batching"]["oldest"]["max_candidate_sequences"] == 2
    assert tensors(stateful, "input")["input_ids"]["dims"] == ["-1", "-1"]
    with pytest.raises(ArtefactError, match="an encoder-decoder has no interactive sessions"):
        export(tmp_path / "t5", T5, interactive_sessions=2)


def test_a_configuration_of_no_family(tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match="none of the sections gpt, gptj, gptneox, llama, decoder, encoder"):
        export(tmp_path, "[bert]\n")
