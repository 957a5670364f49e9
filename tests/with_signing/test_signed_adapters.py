"""Adapters that are served beside a model are signed sources too."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from base64 import b64decode
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from support.runs.signing_keys import Keys
from support.tiny_models.huggingface_models import write_tokenizer
from support.tiny_models.llama_models import save
from support.tiny_models.low_rank import draw, write

from deployment.arguments import ServeArguments
from deployment.serve import prepare
from export_scripts.arguments import ConvertArguments, ExportArguments
from export_scripts.convert import convert
from export_scripts.repository.model_repository import build_repository
from handover.errors import ArtefactError, ConfigError


def test_an_adapter_is_verified_and_is_a_material(keys: Keys, tmp_path: Path) -> None:
    save("llama", tmp_path / "source")
    write_tokenizer(tmp_path / "source")
    signing = {"signing_key": str(keys.key)}
    convert(ConvertArguments(tmp_path / "source", tmp_path / "hf", 1, "fp32", format="huggingface", **signing))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    write(adapter := tmp_path / "peft", draw(model, 1, rank=4), lora_alpha=6)
    (trusted := tmp_path / "trusted.pem").write_bytes(keys.public.read_bytes() + keys.others_public.read_bytes())
    given = ExportArguments(tmp_path / "hf", tmp_path / "repository", "mine", 1, 1, "fp32", 0, 0, 8, **signing)
    given = replace(given, adapters=(("mine", str(adapter)),), signing_trusted=trusted, signing_require=True)
    with pytest.raises(ArtefactError, match="peft is not signed"):
        build_repository(given)
    command = ["sign", "key", adapter, "--signature", adapter / "model.sig", "--private_key", keys.other]
    subprocess.run([sys.executable, "-m", "model_signing", *map(str, command)], check=True, capture_output=True)
    build_repository(given)
    bundle = json.loads((given.output / "provenance.intoto.json").read_text())
    statement = json.loads(b64decode(bundle["dsseEnvelope"]["payload"]))
    materials = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    named = {each["name"]: each["digest"]["sha256"] for each in materials}
    weights = (adapter / "adapter_model.safetensors").read_bytes()
    assert named["adapters/mine/adapter_model.safetensors"] == hashlib.sha256(weights).hexdigest()


def test_adapters_without_signatures_cannot_come_later(keys: Keys, tmp_path: Path) -> None:
    trusted = {"signing_trusted": keys.public, "signing_require": True, "openai_adapter_keys_file": tmp_path / "keys"}
    with pytest.raises(ConfigError, match="adapters that are loaded are unsigned"):
        prepare(ServeArguments(tmp_path, tmp_path / "endpoint.json", tmp_path / "server.log", openai_port=0, **trusted))
