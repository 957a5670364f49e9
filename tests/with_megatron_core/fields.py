"""Lists every field of megatron-core's configurations, and of the classes around it, by class and with its default.

``python tests/with_megatron_core/fields.py --megatron-lm=<checkout> --bridge=<checkout> --nemo=<checkout>`` writes
``tests/data/megatron_fields.json``: what is installed is looked at, the checkouts' sources are read as text.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import enum
import inspect
import json
import re
import subprocess
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data/megatron_fields.json"
_CONFIGS = ("megatron/core/model_parallel_config.py", "megatron/core/transformer/transformer_config.py")
_BRIDGE, _NEMO = "src/megatron/bridge/models", "nemo/collections/llm/gpt/model"
# Files that describe models of Megatron-Bridge, and packages whose models are no text decoders.
_PROVIDERS = r"(provider|builder|model_config)\.py$"
_OTHERS = r"_vl|omni|vision|audio|asr|mimo|diffusion|flux|wan|t5|hf_pretrained|conversion|/data/|hyena|ssm|reranker" + (
    r"|embedding|hf_auto|step37|exaone45|ministral3"
)


def installed() -> dict[str, dict[str, Any]]:
    """The fields of what is installed: each class's own, and the arguments of GPTModel."""
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    found: dict[str, dict[str, Any]] = {}
    seen: set[str] = set()
    for kind in (ModelParallelConfig, TransformerConfig, MLATransformerConfig):
        own = [field for field in dataclasses.fields(kind) if field.name not in seen]
        found[kind.__name__] = {field.name: _shown(field) for field in own}
        seen |= {field.name for field in own}
    arguments = list(inspect.signature(GPTModel.__init__).parameters)
    found["GPTModel"] = {name: None for name in arguments if name not in ("self", *seen)}
    return found


def _shown(field: dataclasses.Field[Any]) -> Any:
    made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    if isinstance(made, enum.Enum) or not isinstance(made, (type(None), bool, int, float, str, list, tuple)):
        return getattr(made, "__name__", str(made))
    return made


class _Checkout:
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def run(self, *command: str) -> str:
        return subprocess.run(["git", "-C", self.folder, *command], capture_output=True, text=True, check=True).stdout

    def tags(self, pattern: str) -> list[str]:
        return [tag for tag in self.run("tag").split() if re.fullmatch(pattern, tag)]

    def names(self, tag: str, folder: str) -> list[str]:
        return [name for name in self.run("ls-tree", "-r", "--name-only", tag, folder).split() if name.endswith(".py")]

    def classes(self, tag: str, file: str) -> dict[str, list[str]]:
        """Fields of each class of a file: what stands in it with a type."""
        tree = ast.parse(self.run("show", f"{tag}:{file}"))
        return {
            node.name: [
                each.target.id
                for each in node.body
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
            ]
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
        }

    def arguments(self, tag: str, file: str) -> list[str]:
        """Names under which a parser keeps what it reads."""
        found = []
        for node in ast.walk(ast.parse(self.run("show", f"{tag}:{file}"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                kept = [each.value for each in node.keywords if each.arg == "dest"]
                flags = [each.value for each in node.args if isinstance(each, ast.Constant)]
                name = kept[0].value if kept else next(each for each in flags if str(each).startswith("--"))  # type: ignore[attr-defined]
                found.append(str(name).removeprefix("--").replace("-", "_"))
        return found


def of_sources(megatron: _Checkout, bridge: _Checkout, nemo: _Checkout) -> dict[str, list[str]]:
    """The fields of what is not installed, those of several versions together, less those that megatron-core has."""
    tags = [*megatron.tags(r"core_v0\.\d+\.0"), "HEAD"]
    core = {name for tag in tags for file in _CONFIGS for own in megatron.classes(tag, file).values() for name in own}
    now = {name for own in installed().values() for name in own}
    found: dict[str, set[str]] = {"megatron-core 0.4 to 0.20, not 0.16.1": core - now}
    arguments = megatron.arguments("core_v0.16.1", "megatron/training/arguments.py")
    found["Megatron-LM core_v0.16.1, arguments"] = {*arguments} - core
    for source, versions, folder, kept, name in (
        (bridge, bridge.tags(r"v0\.\d+\.0"), _BRIDGE, _PROVIDERS, "Megatron-Bridge"),
        (nemo, nemo.tags(r"v2\.[1-4]\.0"), _NEMO, "", "NeMo 2"),
    ):
        own = found.setdefault(f"{name}, {versions[0]} to {versions[-1]}", set())
        for tag in versions:
            for file in source.names(tag, folder):
                if re.search(kept, file) and re.search(_OTHERS, file) is None:
                    classes = source.classes(tag, file).items()
                    own |= {field for kind, fields in classes if re.search("Provider|Config", kind) for field in fields}
        own -= core
    return {name: sorted(fields) for name, fields in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("megatron-lm", "bridge", "nemo"):
        parser.add_argument(f"--{name}", required=True, help="a checkout with its tags")
    given = parser.parse_args()
    read = of_sources(*(_Checkout(folder) for folder in (given.megatron_lm, given.bridge, given.nemo)))
    rows = [f" {json.dumps(name)}: {json.dumps(fields)}" for name, fields in installed().items()]
    others = [f" {json.dumps(name)}: {json.dumps(fields)}" for name, fields in read.items()]
    DATA.write_text(
        '{"megatron-core 0.16.1": {\n' + ",\n".join(rows) + '\n},\n"sources": {\n' + ",\n".join(others) + "\n}}\n"
    )


if __name__ == "__main__":
    main()
