"""Adapters of PEFT, NeMo and Megatron-Bridge in a model repository, served by the engine that is started over it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints.core_adapters import LORA, write_bridge_adapter
from support.checkpoints.llama_adapters import ALPHA, RANK, products
from support.engines.asking import CPU, ask, generated
from support.tiny_models import peft_served
from support.tiny_models.greedy import NEVER, argmaxes
from support.tiny_models.huggingface_models import write_tokenizer
from support.tiny_models.llama_models import save
from support.tiny_models.low_rank import draw, merged, write

from backends.fastertransformer.engine.engine import Engine, open_engine
from backends.fastertransformer.engine.settings import read_settings
from deployment.proof.files import prove_files
from deployment.proof.served_models import find_served_models
from export_scripts.arguments import ConvertArguments, ExportArguments
from export_scripts.convert import convert
from export_scripts.repository.adapters import written_adapters
from export_scripts.repository.model_repository import build_repository
from export_scripts.repository.pbtxt import parse
from handover.errors import ArtefactError, SlipwayError
from handover.manifest import Manifest
from models.described import read_directory
from models.peft import WEIGHTS_FILE, read_adapter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
PLACE = "fastertransformer/1/huggingface/adapters"


@pytest.fixture
def arguments(tmp_path: Path) -> ExportArguments:
    """A Llama's conversion, and what exports it."""
    return converted("llama", tmp_path)


def converted(family: str, tmp_path: Path) -> ExportArguments:
    save(family, tmp_path / "source", **peft_served.CHANGES.get(family, {}))
    write_tokenizer(tmp_path / "source")
    convert(ConvertArguments(tmp_path / "source", tmp_path / "hf", weight_data_type="fp32", format="huggingface"))
    return ExportArguments(tmp_path / "hf", tmp_path / "repository", "mine", 1, 1, "fp32", 0, 0, 8)


def model_of(arguments: ExportArguments) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(arguments.ft_checkpoint, dtype=torch.float32).eval()


def opened(arguments: ExportArguments) -> Engine:
    config = parse((arguments.output / "fastertransformer/config.pbtxt").read_text())
    assert "lora_name" in {each.name for each in config.input}
    settings = read_settings(
        {key: value.string_value for key, value in config.parameters.items()},
        arguments.output / "fastertransformer",
        "1",
    )
    return open_engine(replace(settings, cpu_threads=1, kv_cache_bytes=1 << 22), CPU)


@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral", "qwen3_5_moe", "qwen3"])
def test_adapters_of_all_layers_that_are_served_are_exported(family: str, tmp_path: Path) -> None:
    """Latent attention's second matrix, routers, gates: what is written adds what PEFT's own directory adds."""
    save(family, tmp_path / "hf")
    decoder = read_directory(tmp_path / "hf", ArtefactError).decoder
    given = tuple((name, str(peft_served.DATA / family / name)) for name in peft_served.FAMILIES[family])
    arguments = ExportArguments(tmp_path / "hf", tmp_path / "repository", "mine", 1, 1, "fp32", 0, 0, 8, adapters=given)
    with written_adapters(arguments) as written:
        for name, path in given:
            both = [read_adapter(each, decoder, ArtefactError) for each in (Path(path), written[name])]
            assert both[0].keys() == both[1].keys()
            for key, made in products_of(written[name]).items():
                torch.testing.assert_close(made, products_of(Path(path))[key], rtol=1e-5, atol=1e-6)


def products_of(directory: Path) -> dict[str, torch.Tensor]:
    """What an adapter of PEFT adds, by the key of the first matrix."""
    config = json.loads((directory / "adapter_config.json").read_text())
    stored, scale = load_file(directory / "adapter_model.safetensors"), config["lora_alpha"] / config["r"]
    return {
        key: stored[key.replace("lora_A", "lora_B")] @ down * scale for key, down in stored.items() if ".lora_A." in key
    }


def test_whatever_form_they_came_in_they_are_served_as_pefts(arguments: ExportArguments, tmp_path: Path) -> None:
    model = model_of(arguments)
    pairs = draw(model, 1, rank=4, ranks={"o_proj": 2})
    told = {"lora_alpha": 6, "rank_pattern": {"o_proj": 2}, "use_rslora": True}
    write(tmp_path / "peft", pairs, **told)
    trained = products("llama", is_fused=True)
    bridge = write_bridge_adapter(tmp_path / "bridge", "llama", 2, trained, LORA)
    given = (("mine", str(tmp_path / "peft")), ("bridge.1", str(bridge)))
    manifest = build_repository(replace(arguments, adapters=given))
    assert manifest.problems(arguments.output) == [] and Manifest.read(arguments.output).made_from["adapters"]
    for name, _ in given:
        held = arguments.output / PLACE / name
        assert {each.name for each in held.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
        assert (arguments.output / "mine/1/huggingface/adapters" / name / "adapter_config.json").is_file()
    assert not [each for each in tmp_path.iterdir() if "slipway-tmp" in each.name]
    models = {"": model, "mine": merged(model, pairs, 3.0, {"o_proj": 6 / 2**0.5})}
    models["bridge.1"] = merged(
        model, {key.removesuffix(".weight"): pair for key, pair in trained.items()}, ALPHA / RANK
    )
    engine = opened(arguments)
    assert set(engine.adapters()) == {"mine", "bridge.1"}
    names, line = ["bridge.1", "", "mine"], [5, 9, 33, 7, 60]
    tensors = ask([line] * 3, 10, end_id=NEVER, lora_name=np.array(names, object))
    (outputs,) = engine.generate([engine.parse(tensors)])
    for row, name in enumerate(names):
        found = generated(outputs, row)
        assert found == argmaxes(models[name], line, found), name
    engine.close()


_OTHERS = (pytest.param(each, marks=pytest.mark.long) for each in ("falcon_h1", "qwen3_next", "qwen3_5"))


@pytest.mark.parametrize("family", ["nemotron3_latent", *_OTHERS])
def test_pefts_own_of_layers_with_states_are_served_from_a_repository(family: str, tmp_path: Path) -> None:
    """Under the names of transformers' class, which PEFT reads; the oracle is what PEFT recorded."""
    names, data = list(peft_served.FAMILIES[family]), peft_served.DATA / family
    arguments = converted(family, tmp_path)
    build_repository(replace(arguments, adapters=tuple((name, str(data / name)) for name in names)))
    held, given = (load_file(root / names[0] / WEIGHTS_FILE) for root in (arguments.output / PLACE, data))
    assert held.keys() == given.keys()
    engine, line = opened(arguments), peft_served.INPUT_IDS[0].tolist()
    told = {"end_id": NEVER, "is_return_context_log_probs": True, "lora_name": np.array(names, object)}
    (outputs,) = engine.generate([engine.parse(ask([line] * len(names), 1, **told))])
    recorded = np.load(data / "logits.npz")
    for row, name in enumerate(names):
        scores = torch.from_numpy(recorded[name][0]).log_softmax(-1)[:-1]
        known = scores.gather(1, torch.tensor(line[1:])[:, None])[:, 0].numpy()
        assert np.abs(outputs["context_log_probs"][row, 1 : len(line)] - known).max() < 1e-4
    engine.close()


def test_an_altered_adapter_is_refused_before_it_is_served(arguments: ExportArguments, tmp_path: Path) -> None:
    write(tmp_path / "peft", draw(model_of(arguments), 1, rank=4), lora_alpha=6)
    build_repository(replace(arguments, adapters=(("mine", str(tmp_path / "peft")),)))
    models = find_served_models(arguments.output)
    prove_files(arguments.output, models, ())
    weights = arguments.output / PLACE / "mine" / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.unlink()  # the other link of it stays as it was
    weights.write_bytes(content)
    with pytest.raises(ArtefactError, match=f"1 files .*\n  {PLACE}/mine/{weights.name}  content is not what was"):
        prove_files(arguments.output, models, ())


def test_room_is_what_export_was_told(arguments: ExportArguments) -> None:
    build_repository(replace(arguments, max_adapters=3, max_adapter_rank=24))
    config = parse((arguments.output / "fastertransformer/config.pbtxt").read_text())
    written = {key: value.string_value for key, value in config.parameters.items()}
    assert (written["max_adapters"], written["max_adapter_rank"]) == ("3", "24")


def changed(adapter: Path, **changes: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewritten(adapter: Path, change: Any) -> None:
    path = adapter / "adapter_model.safetensors"
    save_file(change(load_file(path)), path)


HOSTILE: dict[str, tuple[Any, str]] = {
    "dora": (lambda a: changed(a, use_dora=True), "use_dora: True"),
    "bias": (lambda a: changed(a, bias="all"), "bias: 'all'"),
    "modules": (lambda a: changed(a, modules_to_save=["lm_head"]), "modules_to_save"),
    "another rank": (lambda a: changed(a, r=5), "are not matrices of rank 5"),
    "a trained norm": (
        lambda a: rewritten(a, lambda held: {**held, "base_model.model.model.norm.weight": torch.ones(64)}),
        "takes the place of the model's",
    ),
    "nan": (
        lambda a: rewritten(a, lambda held: {name: each * float("nan") for name, each in held.items()}),
        "NaN|finite",
    ),
    "no weights": (lambda a: (a / "adapter_model.safetensors").unlink(), "adapter_model.safetensors"),
    "an unknown layer": (
        lambda a: rewritten(
            a, lambda held: {name.replace("layers.1", "layers.7"): each for name, each in held.items()}
        ),
        "the model has no",
    ),
    "another width": (
        lambda a: rewritten(a, lambda held: {name: each.repeat(1, 2) for name, each in held.items()}),
        "are not matrices of rank|does not fit",
    ),
    "a wide one": (
        lambda a: write(a, {"model.layers.0.self_attn.q_proj": (torch.zeros(257, 64), torch.zeros(64, 257))}),
        "rank 257; the most is 256",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_an_adapter_that_cannot_be_served_is_refused_before_anything_is_written(
    case: str, arguments: ExportArguments, tmp_path: Path
) -> None:
    damage, problem = HOSTILE[case]
    write(tmp_path / "a", draw(model_of(arguments), 0))
    damage(tmp_path / "a")
    with pytest.raises(SlipwayError, match=problem):
        build_repository(replace(arguments, adapters=(("a", str(tmp_path / "a")),)))
    assert not list(arguments.output.rglob("*.safetensors"))
    assert not [each for each in tmp_path.iterdir() if "slipway-tmp" in each.name]


def test_names_are_names_of_directories(arguments: ExportArguments, tmp_path: Path) -> None:
    with pytest.raises(SlipwayError, match="'../a' is no name of an adapter"):
        build_repository(replace(arguments, adapters=(("../a", str(tmp_path)),)))
    with pytest.raises(SlipwayError, match="names a twice"):
        build_repository(replace(arguments, adapters=(("a", str(tmp_path)), ("a", str(tmp_path)))))
    with pytest.raises(SlipwayError, match="does not exist"):
        build_repository(replace(arguments, adapters=(("a", str(tmp_path / "absent")),)))
