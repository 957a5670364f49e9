"""Prove the weights before anything is started.

FasterTransformer warns about a shard that it cannot open and serves random numbers in its place. So the
list of shards is computed here, from config.ini and tensor_para_size alone, and each must be there with
its size; where a manifest records the shard, every byte is compared with its digest too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path

from deployment.served_models import ServedModel
from export_scripts.weights import gpt
from export_scripts.weights.schema import ModelDims, TargetTensor, in_every_layer
from handover.digests import file_digest
from handover.errors import ArtefactError
from handover.manifest import FILE_NAME as MANIFEST_NAME
from handover.manifest import FileRecord, Manifest
from handover.progress import Progress

_ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
_PREFIX_PROMPT, _P_PROMPT_TUNING = 2, 3
_MOST_LISTED = 40
_HEAD = "model.lm_head.weight.bin"


def expected_shards(
    config: Mapping[str, str], tensor_para_size: int, tasks: Mapping[str, int] | None = None, untied: bool = False
) -> dict[str, int]:
    """Compute which files FasterTransformer's GPT opens, and their sizes.

    Source of names and shapes: ``export_scripts/weights/gpt.py``; of adapters, prompts and the defaults of optional
    keys: FasterTransformer's ParallelGptDecoderLayerWeight.cc, ParallelGptWeight.cc and ParallelGptTritonModel.cc.

    Args:
        config: section [gpt] of config.ini, keys in lower case.
        tensor_para_size: number of shards of each split tensor.
        tasks: prompt-learning tasks: name to number of virtual tokens.
        untied: there is a ``model.lm_head.weight.bin``; its presence alone tells FasterTransformer.

    Returns:
        File name to bytes.

    Raises:
        ArtefactError: a key is missing or no number, or tensor_para_size does not divide the model.
    """
    number, flag = partial(_number, config), partial(_flag, config)
    has_table = flag("has_positional_encoding", True)
    dims = ModelDims(
        head_num=number("head_num"),
        size_per_head=number("size_per_head"),
        inter_size=number("inter_size"),
        num_layer=number("num_layer"),
        max_pos_seq_len=number("max_pos_seq_len") if has_table else 0,
        vocab_size=number("vocab_size"),
        layernorm_eps=0.0,
        has_untied_head=untied,
        has_positional_encoding=has_table,
        has_pre_decoder_layernorm=flag("has_pre_decoder_layernorm", False),
        has_post_decoder_layernorm=flag("has_post_decoder_layernorm", True),
    )
    if dims.head_num % tensor_para_size or dims.inter_size % tensor_para_size:
        raise ArtefactError(
            f"tensor_para_size {tensor_para_size} does not divide head_num {dims.head_num} and inter_size"
            f" {dims.inter_size}"
        )
    targets = gpt.schema(dims) | _prompts(number("prompt_learning_type", 0), tasks or {})
    if flag("has_adapters", False):
        adapters = _adapters(number("adapter_inter_size", dims.inter_size))
        targets |= in_every_layer(adapters, dims.num_layer)
    return {
        f"{name}{rank}.bin": prod(target.shard_shape(dims, tensor_para_size)) * _item_bytes(config)
        for name, target in targets.items()
        for rank in ([""] if target.split_axis is None else [f".{rank}" for rank in range(tensor_para_size)])
    }


def _adapters(inter_size: int) -> dict[str, TargetTensor]:
    """List one layer's adapters, which no converter of ours writes."""
    each = {
        "dense_h_to_4h.weight": TargetTensor(("hidden_units", inter_size), split_axis=1),
        "dense_h_to_4h.bias": TargetTensor((inter_size,), split_axis=0),
        "dense_4h_to_h.weight": TargetTensor((inter_size, "hidden_units"), split_axis=0),
        "dense_4h_to_h.bias": TargetTensor(("hidden_units",)),
    }
    places = ("after_attention_adapter", "after_ffn_adapter")
    return {f"{place}.{name}": target for place in places for name, target in each.items()}


def _prompts(kind: int, tasks: Mapping[str, int]) -> dict[str, TargetTensor]:
    lengths = {task: length for task, length in tasks.items() if length > 0}
    if kind == _P_PROMPT_TUNING:
        return {f"model.prompt_table.{task}.weight": TargetTensor((n, "hidden_units")) for task, n in lengths.items()}
    if kind == _PREFIX_PROMPT:
        shapes = {task: ("num_layer", 2, "head_num", length, "size_per_head") for task, length in lengths.items()}
        return {f"model.prefix_prompt.{task}.weight": TargetTensor(shape, 2) for task, shape in shapes.items()}
    return {}


def _number(config: Mapping[str, str], key: str, default: int | None = None) -> int:
    text = config.get(key, "" if default is None else str(default))
    if not text.strip().isdigit():
        raise ArtefactError(f"config.ini has no number for '{key}'", "export again, or complete the file")
    return int(text)


def _flag(config: Mapping[str, str], key: str, default: bool) -> bool:
    # INIReader::GetBoolean takes exactly these words.
    text = config.get(key, "").strip().lower()
    return _BOOLEANS.get(text, default)


_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def _item_bytes(config: Mapping[str, str]) -> int:
    # FasterTransformer takes what it does not know for fp32; a wrong size would then be read as garbage.
    name = config.get("weight_data_type", "fp32")
    if name not in _ITEM_BYTES:
        raise ArtefactError(f"config.ini: weight_data_type '{name}' is unknown", f"legal: {', '.join(_ITEM_BYTES)}")
    return _ITEM_BYTES[name]


def prove_weights(model: ServedModel, repository: Path) -> int:
    """Compare every shard that the model will load with what it must be.

    Args:
        model: one of ``find_served_models``.
        repository: whose manifest also records the shards.

    Returns:
        Number of shards that a digest vouched for; the others were proved by name and size.

    Raises:
        ArtefactError: names every shard that is missing, of another size or of other content.
    """
    _check_tensor_para_size(model)
    records = _records(model, repository)
    if model.family == "gpt":
        # A recorded head that is not there is missing: FasterTransformer would take the model for a tied one.
        untied = _HEAD in records or (model.checkpoint / _HEAD).is_file()
        shards = expected_shards(model.config, model.tensor_para_size, model.tasks, untied)
    else:  # what the manifest lists; without one the engine's own list of shards is the proof, when it loads
        shards = {name: record.size_bytes for name, record in records.items() if name.endswith(".bin")}
    problems = {name: problem for name, size in shards.items() if (problem := _size_problem(model, name, size))}
    problems |= _content_problems(
        model, {name: records[name] for name in shards.keys() & records.keys() - problems.keys()}
    )
    if problems:
        lines = [f"{name}  {problems[name]}" for name in sorted(problems)]
        more = [f"... and {len(lines) - _MOST_LISTED} more"] if len(lines) > _MOST_LISTED else []
        raise ArtefactError(
            f"{len(problems)} of {len(shards)} shards in {model.checkpoint} are not the model's weights\n  "
            + "\n  ".join(lines[:_MOST_LISTED] + more),
            "nothing was started; redo the stages that make them: force=[convert,export]",
        )
    return len(shards.keys() & records.keys())


def _check_tensor_para_size(model: ServedModel) -> None:
    made_for = model.config.get("tensor_para_size")
    if made_for is not None and made_for != str(model.tensor_para_size):
        raise ArtefactError(
            f"{model.checkpoint} was made for tensor_para_size {made_for}, "
            f"but config.pbtxt of '{model.name}' says {model.tensor_para_size}",
            "export the FT checkpoint of the tensor_para_size to serve with",
        )


def _records(model: ServedModel, repository: Path) -> dict[str, FileRecord]:
    """What is recorded of the checkpoint's files, by name: by its own manifest, else by the repository's."""
    if (model.checkpoint / MANIFEST_NAME).is_file():
        return {record.path: record for record in Manifest.read(model.checkpoint).files}
    checkpoint, root = model.checkpoint.resolve(), repository.resolve()
    if not (repository / MANIFEST_NAME).is_file() or not checkpoint.is_relative_to(root):
        return {}
    prefix = checkpoint.relative_to(root).as_posix() + "/"
    files = Manifest.read(repository).files
    return {record.path[len(prefix) :]: record for record in files if record.path.startswith(prefix)}


def _size_problem(model: ServedModel, name: str, size_bytes: int) -> str:
    try:
        found = (model.checkpoint / name).stat().st_size
    except OSError:
        return "missing"
    return "" if found == size_bytes else f"{found} bytes instead of {size_bytes}"


@contextmanager
def _cancelling(pool: ThreadPoolExecutor) -> Iterator[None]:
    try:
        yield
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C waits for the shards being read, not for all


def _content_problems(model: ServedModel, records: Mapping[str, FileRecord]) -> dict[str, str]:
    owners = {record.digest: name for name, record in records.items()}
    total = sum(record.size_bytes for record in records.values())
    problems = {}
    pool = ThreadPoolExecutor()
    with Progress("deploy", len(records), "shards", total) as bar, _cancelling(pool):
        digests = {
            pool.submit(file_digest, model.checkpoint / name, record.digest): record for name, record in records.items()
        }
        for future in as_completed(digests):
            record = digests[future]
            if future.result() != record.digest:
                owner = owners.get(future.result())
                problems[record.path.rsplit("/", 1)[-1]] = (
                    f"content is that of {owner}"
                    if owner
                    else (f"content differs from its digest {record.digest[:19]}")
                )
            bar.advance(size_bytes=record.size_bytes)
    return problems
