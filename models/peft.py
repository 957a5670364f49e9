"""LoRA adapters as PEFT saves them: what a directory adds to which linear layers of a decoder.

Files, keys and scaling: PEFT, ``utils/save_and_load.py`` and ``tuners/lora/config.py``: ``W + s B A`` with ``s`` alpha
/ r, or alpha / sqrt(r) with ``use_rslora``. Fields of ``LoraConfig`` that change anything else are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

from models.checks import Checks, Refusal, quoted
from models.decoder import Decoder
from models.described import NUMBER_TYPES
from models.directory import open_regular, read_json
from models.fused import PARTS, taken_apart
from models.safetensors import StoredTensor, read_header
from models.text_names import text_name

DIRECTORY, CONFIG_FILE, WEIGHTS_FILE = "adapters", "adapter_config.json", "adapter_model.safetensors"
"""Where a served model's directory has its adapters, by name, and the files of each."""
PREFIX = "base_model.model."
KEY = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
BASE = ".base_layer.weight"
"""What follows the name of a module whose weight, before what is added, PEFT saves too: the head's."""
MOST_ADAPTERS, LARGEST_RANK = 64, 256
"""On a device at once, and of a served adapter."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PATTERN = re.compile(r"[\w.]+")
_LAYER = re.compile(r"\.layers\.(\d+)\.")
# What the sum does not depend on, or what is read below. The keys of the weights say which modules there are.
_HARMLESS = (
    *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_type"),
    *("peft_version", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out"),
    *("lora_dropout", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save"),
    *("runtime_config", "megatron_core", "qalora_group_size", "init_lora_weights", "bias", "ensure_weight_tying"),
    *("eva_config", "target_parameters"),
)
_REASONS = {
    "use_dora": "its weights are also scaled by a vector",
    "alora_invocation_tokens": "it is at work only behind these tokens",
    "layer_replication": "it makes layers of its own",
    "trainable_token_indices": "single rows of the embedding are trained",
    "target_parameters": "parameters that are no layer's weight are trained",
    "lora_bias": "the second matrix has a bias",
}
# Others, such as pissa and olora, change the model before training: the adapter fits what is left of its weights.
_UNCHANGED_BASE = ("gaussian", "eva", "orthogonal")
_ROLES = (
    *("query", "key", "value", "query_key_value", "attention_output", "gate", "up", "gate_up", "down"),
    *("latent.query", "latent.query_down", "latent.query_up", "latent.kv_down", "latent.kv_up", "latent.output"),
    *("router", "shared.gate", "shared.up", "shared.down", "shared_gate", "latent_in", "latent_out"),
    *("mamba_in", "mamba_output", "delta_output"),
    *("delta_in", "delta_gates", "delta_qkv", "delta_z", "delta_b", "delta_a"),
)
_MOST_LISTED = 8
_WEIGHT = ".weight"


class Rows(NamedTuple):
    """A matrix of ``taken_apart(decoder)``, and its rows in the linear layer that has them."""

    name: str
    first: int
    outputs: int


class LinearLayer(NamedTuple):
    """A linear layer that an adapter may change.

    Attributes:
        outputs, inputs: of its weight.
        rows: the matrices that it is taken apart into; most are one.
    """

    outputs: int
    inputs: int
    rows: tuple[Rows, ...]


class Update(NamedTuple):
    """What an adapter adds to one linear layer: scale * up @ down.

    Attributes:
        down, up: [rank, inputs] and [outputs, rank], in the file of weights.
        scale: of the product.
    """

    down: StoredTensor
    up: StoredTensor
    scale: float

    @property
    def rank(self) -> int:
        """Rank of the product."""
        return self.up.shape[1]


def names_in_files(module: str) -> tuple[str, ...]:
    """Return the names that a model's files may have for a module of an adapter.

    transformers' class of Nemotron-H calls ``model`` what all files of such models call ``backbone``, and that of
    Mixtral ``mlp`` where a router is that files, and the class before, have in a ``block_sparse_moe``. The adapter may
    be of a class that sees images, and the model its text alone.
    """
    name = module.removeprefix(PREFIX)
    text = text_name(name)
    found = [name, text]
    if text.startswith("model."):
        found.append(f"backbone.{text.removeprefix('model.')}")
    if text.removesuffix(_WEIGHT).endswith(".mlp.gate"):
        found.append(text.replace(".mlp.gate", ".block_sparse_moe.gate"))
    return tuple(dict.fromkeys(found))


def name_in_class(name: str) -> str:
    """Return what transformers' class, and so PEFT, calls a module, given its name in the files; see names_in_files."""
    inner = name.removeprefix("backbone.")
    return f"model.{inner}" if inner != name else name.replace(".block_sparse_moe.gate", ".mlp.gate")


def check_name(name: str, error: Refusal) -> str:
    """Return the name of an adapter; ``error`` makes the exception for one that is no name of a directory."""
    if not _NAME.fullmatch(name):
        raise error(
            f"{quoted(name)} is no name of an adapter", "take 1 to 64 letters, digits, '.', '_' and '-', no mark first"
        )
    return name


def adapters_in(directory: Path) -> dict[str, Path]:
    """Find the adapters of a model's directory by name."""
    found = directory / DIRECTORY
    return {each.name: each for each in sorted(found.iterdir()) if each.is_dir()} if found.is_dir() else {}


def linear_layers(decoder: Decoder) -> dict[str, LinearLayer]:
    """List the linear layers that a served adapter may change, by transformers' name."""
    apart, found = taken_apart(decoder), dict[str, LinearLayer]()
    shapes = {name: tensor.shape for name, tensor in apart.tensors().items()}
    for index in range(decoder.num_layer):
        names, parts = decoder.layer_tensors(index), apart.layer_tensors(index)
        for role in (each for each in _ROLES if each in names):
            own = [parts[part] for part in PARTS.get(role, (role,))]
            rows, first = list[Rows](), 0
            for name in own:
                rows.append(Rows(name, first, shapes[f"{name}.weight"][0]))
                first += rows[-1].outputs
            found[names[role]] = LinearLayer(first, shapes[f"{own[0]}.weight"][1], tuple(rows))
    head = decoder.names["head"]
    return found | {head: LinearLayer(decoder.vocab_size, decoder.hidden_units, (Rows(head, 0, decoder.vocab_size),))}


def read_adapter(directory: Path, decoder: Decoder, error: Refusal) -> dict[str, Update]:
    """Read what an adapter adds to a decoder's linear layers, by their names; of the numbers nothing is read.

    Args:
        directory: with the two files.
        decoder: that it is for.
        error: makes the exception for what is damaged, does not fit, or is more than such sums.
    """
    config, where = check_sums_alone(directory, error), str(directory / CONFIG_FILE)
    layers, sides, problems = linear_layers(decoder), dict[str, dict[str, StoredTensor]](), list[str]()
    of_base = f"{PREFIX}{decoder.names['head']}{BASE}"
    for key, stored in _header(directory, error).items():
        if found := KEY.fullmatch(key):
            sides.setdefault(found["module"].removeprefix(PREFIX), {})[found["side"]] = stored
        elif key != of_base or stored.shape != (decoder.vocab_size, decoder.hidden_units):
            problems.append(f"{key}: no matrix of a linear layer's update")
    updates = dict[str, Update]()
    for name, pair in sides.items():
        rank, scale = rank_and_scale(config, where, name, error)
        own = next((each for each in names_in_files(name) if each in layers), name)
        if problem := _problem(name, pair, rank, layers.get(own)):
            problems.append(problem)
        elif own in updates:
            problems.append(f"{name}: its matrices are there twice, as {own}'s too")
        else:
            updates[own] = Update(pair["A"], pair["B"], scale)
    problems += [f"{name}: PEFT passes over it, as {why}" for name in sides if (why := _not_asked_for(config, name))]
    if absent := absent_targets(config, tuple(sides), tuple(layers)):
        problems.append(f"it has no matrices for the target_modules {', '.join(absent)}")
    if problems or not updates:
        more = [f"... and {len(problems) - _MOST_LISTED} more"] if len(problems) > _MOST_LISTED else []
        lines = "\n  ".join(problems[:_MOST_LISTED] + more or ["it has no matrices"])
        raise error(f"{directory} does not fit the model\n  {lines}", "take an adapter of this very model")
    return updates


def copied_head(directory: Path, decoder: Decoder, error: Refusal) -> StoredTensor | None:
    """Return the head that an adapter was trained on, which PEFT saves beside its matrices; None: it is not there."""
    return _header(directory, error).get(f"{PREFIX}{decoder.names['head']}{BASE}")


def absent_targets(config: Mapping[str, Any], saved: Iterable[str], modules: Iterable[str]) -> list[str]:
    """List the kinds of modules that a configuration names and the model has, and the adapter has not.

    PEFT passes over names that nothing in the model has, as long as another name has something.
    """
    listed, saved, modules = _targets(config), tuple(saved), tuple(modules)
    left_out = config.get("exclude_modules")
    left_out = left_out if isinstance(left_out, list) else listed if left_out else []
    return [
        target
        for target in listed
        if target not in left_out and not _any_is(target, saved) and _any_is(target, modules)
    ]


def _targets(config: Mapping[str, Any]) -> list[str]:
    """List the modules that a configuration names; empty: it describes them otherwise.

    Routers are named by their weight, as parameters: in transformers' classes they are no linear layers.
    """
    modules, weights = config.get("target_modules") or [], config.get("target_parameters") or []
    listed = [*modules, *weights] if isinstance(modules, list) and isinstance(weights, list) else []
    return [target.removesuffix(_WEIGHT) for target in listed if isinstance(target, str)]


def _any_is(target: str, modules: Iterable[str]) -> bool:
    return any(module == target or module.endswith(f".{target}") for module in modules)


def _not_asked_for(config: Mapping[str, Any], name: str) -> str:
    """Return why a configuration leaves a module out whose matrices are there; empty: it does not."""
    if (listed := _targets(config)) and not any(_any_is(target, (name,)) for target in listed):
        return "target_modules does not name it"
    layers, index = config.get("layers_to_transform"), _LAYER.search(name)
    wanted = [layers] if isinstance(layers, int) else layers if isinstance(layers, list) else None
    return "layers_to_transform leaves its layer out" if wanted and index and int(index[1]) not in wanted else ""


def check_sums_alone(directory: Path, error: Refusal) -> dict[str, Any]:
    """Read an adapter's configuration; one that is more than sums beside a model's weights is refused."""
    config, where = read_json(directory / CONFIG_FILE, error), str(directory / CONFIG_FILE)
    if not config:
        raise error(f"{directory} has no {CONFIG_FILE}", "it is no adapter as PEFT's save_pretrained() writes it")
    if beyond := [*beyond_sums(config, where, error), *_beyond_served(config)]:
        listed = "\n  ".join(beyond)
        raise error(f"{where} describes an adapter that is not served\n  {listed}", "merge it into a model of its own")
    return config


def _header(directory: Path, error: Refusal) -> dict[str, StoredTensor]:
    path = directory / WEIGHTS_FILE
    try:
        with open_regular(path) as stream:
            return read_header(stream, path.stat().st_size, str(path), error)
    except OSError as problem:
        hint = "PEFT's save_pretrained(safe_serialization=True) writes it; pickles (.bin) are not served"
        raise error(f"{path} cannot be read: {problem.strerror}", hint) from None


def _problem(name: str, pair: Mapping[str, StoredTensor], rank: int, layer: LinearLayer | None) -> str:
    """Return what is wrong with the two matrices of a module, if anything."""
    if absent := [side for side in "AB" if side not in pair]:
        return f"{name}.lora_{absent[0]}.weight: missing"
    if layer is None:
        return f"{name}: the model has no such linear layer whose adapters are served"
    if rank > LARGEST_RANK:
        return f"{name}: rank {rank}; the most is {LARGEST_RANK}"
    wanted = {"A": (rank, layer.inputs), "B": (layer.outputs, rank)}
    for side, stored in pair.items():
        if stored.shape != wanted[side]:
            return f"{name}.lora_{side}.weight: {list(stored.shape)}, expected {list(wanted[side])}"
        if stored.data_type not in NUMBER_TYPES.values():
            return (
                f"{name}.lora_{side}.weight: of type {stored.data_type}; legal are {', '.join(NUMBER_TYPES.values())}"
            )
    return ""


def beyond_sums(config: Mapping[str, Any], where: str, error: Refusal) -> list[str]:
    """List what of a configuration makes more than sums of a weight and a product, ``key: value  (reason)`` a line."""
    if config.get("peft_type") != "LORA":
        raise error(f"{where}: peft_type is {quoted(config.get('peft_type'))}", "adapters of type LORA are read")
    found = [
        f"{key}: {quoted(value)}  ({_REASONS.get(key, 'it is not known here')})"
        for key, value in config.items()
        if key not in _HARMLESS and value not in (None, False, "", {}, [])
    ]
    weights = config.get("target_parameters") or []
    if not (isinstance(weights, list) and all(isinstance(name, str) and name.endswith(_WEIGHT) for name in weights)):
        found.append(f"target_parameters: {quoted(weights)}  ({_REASONS['target_parameters']})")
    if config.get("bias", "none") != "none":
        found.append(f"bias: {quoted(config['bias'])}  (the model's biases are trained with it)")
    started = config.get("init_lora_weights", True)
    if isinstance(started, str) and started not in _UNCHANGED_BASE:
        found.append(f"init_lora_weights: {quoted(started)}  (it belongs to weights that were changed before training)")
    return found


def _beyond_served(config: Mapping[str, Any]) -> list[str]:
    """List what can be merged into a model, and is not served beside it."""
    found = []
    if config.get("modules_to_save"):
        found.append(f"modules_to_save: {quoted(config['modules_to_save'])}  (whole tensors are the model's)")
    if config.get("fan_in_fan_out"):
        found.append("fan_in_fan_out: True  (the linear layers of a decoder that is served are [out, in])")
    return found


def rank_and_scale(config: Mapping[str, Any], where: str, module: str, error: Refusal) -> tuple[int, float]:
    """Return the rank of a module's product, and what it is multiplied by."""
    checks = Checks(error)
    rank = checks.positive(_of_module(config, where, "rank_pattern", module, config.get("r", 8), error), f"{where}: r")
    alpha = _of_module(config, where, "alpha_pattern", module, config.get("lora_alpha", 8), error)
    scale = checks.number(alpha, f"{where}: lora_alpha") / (sqrt(rank) if config.get("use_rslora") else rank)
    return rank, scale


def _of_module(config: Mapping[str, Any], where: str, key: str, module: str, default: Any, error: Refusal) -> Any:
    """Take a module's own value out of a pattern, whose names are ends of modules' names."""
    pattern = config.get(key) or {}
    if not isinstance(pattern, Mapping):
        raise error(f"{where}: {key} is {quoted(pattern)}, not an object", "")
    for name in pattern:
        if not _PATTERN.fullmatch(name):
            raise error(f"{where}: {key} holds {quoted(name)}", "names of modules are read")
        if f".{module}".endswith(f".{name}"):
            return pattern[name]
    return default
