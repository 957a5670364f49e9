"""Which keys of ``config.json`` the installed transformers reads for a model: found in its source, nothing is imported.

In ``tests/``, ``python -m support.tiny_models.transformers_keys`` lists what tests/data/transformers_keys.json does
not account for.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

TABLE: dict[str, Any] = json.loads((Path(__file__).parents[2] / "data/transformers_keys.json").read_text())
EVERY = "every model"
MODEL_TYPES = tuple(name for name in TABLE if name != EVERY)
_ALSO = {"mistral": ("ministral",)}
"""Whose class is taken instead, where the configuration asks for it."""
_COMMON = (
    "configuration_utils.py",
    "modeling_rope_utils.py",
    "masking_utils.py",
    "cache_utils.py",
    "modeling_utils.py",
)
_CONFIGS = ("config", "decoder_config", "text_config", "layer_config", "effective_config", "encoder_config")
_CLASSES = ("PreTrainedConfig", "RotaryEmbeddingConfigMixin")
_MADE_BY = ("__post_init__", "convert_rope_params_to_dict", "standardize_rope_params")


def keys_read(model_type: str) -> set[str]:
    """Name every key that the model's classes, or the code that all models share, take out of a configuration."""
    spec = find_spec("transformers")
    assert spec is not None and spec.origin is not None
    root = Path(spec.origin).parent
    files = [root / name for name in _COMMON]
    for name in (model_type, *_ALSO.get(model_type, ())):
        module = name.removesuffix("_text")
        files += [root / f"models/{module}/{kind}_{module}.py" for kind in ("configuration", "modeling")]
    return set().union(*map(_keys_of, files))


def accounted_for(model_type: str) -> dict[str, str]:
    """Say of each key in the table what becomes of it: "honoured", "refused", or why it changes nothing."""
    found: dict[str, str] = {}
    for name in (EVERY, model_type):
        for kind in ("honoured", "refused"):
            found |= dict.fromkeys(TABLE[name].get(kind, "").split(), kind)
        for reason, keys in TABLE[name].get("without effect", {}).items():
            found |= dict.fromkeys(keys.split(), reason)
    return found


@cache
def _keys_of(file: Path) -> frozenset[str]:
    tree = ast.parse(file.read_text())
    found = set(_taken(tree, _CONFIGS, "config"))
    is_of_configurations = file.name.startswith("configuration_") and file.parent.name != "transformers"
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and (is_of_configurations or node.name in _CLASSES):
            found |= set(_declared(node))
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name in _MADE_BY:
                    found |= set(_taken(method, ("self", "kwargs"), "kwargs"))
    return frozenset(key for key in found if not key.startswith("__"))


def _declared(node: ast.ClassDef) -> Iterator[str]:
    """Fields of a configuration class, and both names of each alias."""
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and "ClassVar" not in ast.dump(each):
            yield each.target.id
        if isinstance(each, ast.Assign) and isinstance(each.value, ast.Dict) and "attribute_map" in ast.dump(each):
            yield from filter(None, map(_text, (*each.value.keys, *each.value.values)))


def _taken(tree: ast.AST, names: tuple[str, ...], mapping: str) -> Iterator[str]:
    """What is taken of an object that is a configuration: by attribute, getattr, or as a mapping's entry."""
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        found = None
        if isinstance(node, ast.Attribute) and id(node) not in called and _is_of(node.value, names):
            found = node.attr
        elif (
            isinstance(node, ast.Call) and len(node.args) > 1 and getattr(node.func, "id", "") in ("getattr", "hasattr")
        ):
            found = _text(node.args[1]) if _is_of(node.args[0], names) else None
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("pop", "get", "setdefault"):
            found = _text(node.args[0]) if _is_of(node.func.value, (mapping,)) else None  # type: ignore[attr-defined]
        elif isinstance(node, ast.Compare) and _is_of(node.comparators[0], (mapping,)):
            found = _text(node.left)
        if found:
            yield found


def _text(node: ast.AST | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _is_of(node: ast.AST, names: tuple[str, ...]) -> bool:
    """Whether an expression is a configuration: by its name, or by that of an attribute."""
    return getattr(node, "id", None) in names or getattr(node, "attr", None) in names


def main() -> None:
    """Print what differs, by model."""
    for model_type in MODEL_TYPES:
        there, told = keys_read(model_type), accounted_for(model_type)
        new, old = (" ".join(sorted(keys)) for keys in (there - told.keys(), told.keys() - there))
        sys.stdout.write(f"{model_type}  new: {new}  no longer read: {old}\n")


if __name__ == "__main__":
    main()
