"""Find the models that the endpoint offers: what each takes, where its tokenizer lies, how it is named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from deployment.openai.arguments import OpenAIArguments
from deployment.openai.engine.triton import Triton
from deployment.openai.texts.offered_models import Model, Models
from deployment.openai.texts.texts import Texts, load_texts
from deployment.openai.tools.dialects import dialect_named
from deployment.proof.served_models import PUBLISHED_PARAMETERS, ServedModel, find_served_models
from export_scripts.repository.names import ENGINE, ENSEMBLE, PREPROCESSING
from handover.chat import Chat, read_chat
from handover.endpoint import MODEL_DIGEST, Endpoint
from handover.errors import ArtefactError, ServerError
from handover.manifest import FILE_NAME as MANIFEST_NAME
from handover.manifest import Manifest
from handover.regular_file import SETTINGS_BYTES, read_text
from models.peft import adapters_in

_T5 = "t5"
_POSITIONS = ("max_pos_seq_len", "relative_attention_num_buckets_or_max_pos_seq_len")


async def find_models(arguments: OpenAIArguments, endpoint: Endpoint, triton: Triton) -> Models:
    """Ask the server which models take token ids, and find their tokenizers.

    Raises:
        ServerError: no server answers, or it has no model of FasterTransformer's tensors.
        ArtefactError: a tokenizer cannot be found or read.
    """
    place = arguments.model_repository or (Path(endpoint.model_repository) if endpoint.model_repository else None)
    repository = place if place is not None and place.is_dir() else None
    names = arguments.models or _names_in(repository)
    configs = {name: config for name in names if (config := await triton.config(name)) is not None}
    if arguments.tool_dialect:
        dialect_named(arguments.tool_dialect)
    on_disk = {each.name: each for each in find_served_models(repository)} if repository is not None else {}
    preprocessing = await triton.config(PREPROCESSING)
    found = [
        _describe(config, configs, on_disk.get(name), preprocessing, arguments)
        for name, config in configs.items()
        if _takes_ids(config) and not config.ensemble_scheduling.step
    ]
    if not found:
        raise ServerError(
            f"the server at {triton.url} has no model that takes FasterTransformer's input_ids one prompt at a time: "
            f"asked for {', '.join(names)}",
            "name one with --models; a model with interactive sessions cannot be asked through this API",
        )
    return Models(_with_origin(found, repository))


def _with_origin(found: list[Model], repository: Path | None) -> list[Model]:
    """Add the repository's digest, and the name that the only model was exported under: a T5 has no ensemble of it."""
    if repository is None or not (repository / MANIFEST_NAME).is_file():
        return found
    manifest = Manifest.read(repository)
    models = [replace(model, settings={**model.settings, MODEL_DIGEST: manifest.digest}) for model in found]
    name = str(manifest.made_from.get("model_name", ""))
    if not name or len(models) > 1:
        return models
    return [replace(models[0], names=tuple(dict.fromkeys((name, *models[0].names))))]


def _names_in(repository: Path | None) -> tuple[str, ...]:
    """Triton's own list of models is closed to clients, so the names are those of the repository's directories."""
    if repository is None:
        return (ENGINE,)
    return tuple(path.parent.name for path in sorted(repository.glob("*/config.pbtxt")))


def _takes_ids(config: Any) -> bool:
    names = {tensor.name for tensor in config.input}
    return "input_ids" in names and "session_len" not in names


def _describe(
    config: Any, configs: Mapping[str, Any], on_disk: ServedModel | None, preprocessing: Any, arguments: OpenAIArguments
) -> Model:
    keys = dict(on_disk.config) if on_disk is not None else {}
    inputs = frozenset(tensor.name for tensor in config.input)
    is_encoder_decoder = "max_output_len" in inputs
    given = {} if preprocessing is None else {k: v.string_value for k, v in preprocessing.parameters.items()}
    start = keys.get("start_id") or keys.get("decoder_start_token_id") or given.get("start_id") or "0"
    end = keys.get("end_id") or keys.get("eos_token_id") or given.get("end_id")
    if arguments.end_id is not None:
        end = str(arguments.end_id)
    if end is None:
        raise ServerError(f"nothing says which token ends a text of model '{config.name}'", "give --end-id")
    positions = next((int(keys[key]) for key in _POSITIONS if keys.get(key)), 0)
    is_relative = is_encoder_decoder and keys.get("position_embedding_type", "relative") == "relative"
    adapters = {} if on_disk is None else {name: str(path) for name, path in adapters_in(on_disk.checkpoint).items()}
    texts = load_texts(_tokenizer(on_disk, arguments), int(start), int(end), is_encoder_decoder)
    return Model(
        names=(*_aliases(config.name, configs), config.name),
        engine=config.name,
        inputs=inputs,
        outputs=frozenset(tensor.name for tensor in config.output),
        max_positions=None if is_relative else positions or None,
        vocab_size=int(keys["vocab_size"]) if keys.get("vocab_size") else None,
        is_encoder_decoder=is_encoder_decoder,
        rows=max(1, config.max_batch_size),
        is_decoupled=bool(config.model_transaction_policy.decoupled),
        texts=texts,
        chat=_load_chat(texts, arguments),
        tool_dialect=arguments.tool_dialect or "",
        adapters=adapters,
        settings=_settings(config, keys),
    )


def _settings(config: Any, keys: Mapping[str, str]) -> dict[str, str]:
    told = {name: config.parameters[name].string_value for name in PUBLISHED_PARAMETERS if name in config.parameters}
    return told | ({"weight_data_type": keys["weight_data_type"]} if "weight_data_type" in keys else {})


def _load_chat(texts: Texts, arguments: OpenAIArguments) -> Chat | None:
    chat = read_chat(texts.directory) if texts.directory.is_dir() else Chat()
    if arguments.chat_template is not None:
        chat = replace(chat, template=read_text(arguments.chat_template, SETTINGS_BYTES), tool_template="")
    chat = replace(chat, tokens=texts.special or chat.tokens)
    return chat if chat.template else None


def _aliases(engine: str, configs: Mapping[str, Any]) -> list[str]:
    """Names of ensembles of one step that stand for a model: the name that it was exported under."""
    return [
        name
        for name, config in configs.items()
        if name != ENSEMBLE and [step.model_name for step in config.ensemble_scheduling.step] == [engine]
    ]


def _tokenizer(on_disk: ServedModel | None, arguments: OpenAIArguments) -> Path:
    if arguments.tokenizer is not None:
        return arguments.tokenizer
    if on_disk is None:
        raise ArtefactError(
            "the served repository is not on this machine, so its tokenizer cannot be read",
            "give --model-repository, or --tokenizer and --end-id",
        )
    return on_disk.checkpoint
