"""Reader of NeMo 1.x checkpoints: ``.nemo`` archives and unpacked directories, any training TP and PP.

File names: NeMo, ``inject_model_parallel_rank``: ``model_weights.ckpt``, ``mp_rank_XX/`` with tensor parallelism
alone, ``tp_rank_XX_pp_rank_YYY/`` with pipeline parallelism, ``model_weights/`` for distributed checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.files.distributed import is_distributed, open_distributed
from export_scripts.checkpoints.files.rank_files import RankFiles
from export_scripts.checkpoints.files.yaml_file import read_yaml
from export_scripts.checkpoints.megatron.gpt import State, gpt_source
from export_scripts.checkpoints.nemo.config_file import CONFIG_FILE
from export_scripts.checkpoints.nemo.gpt_config import key_remarks
from export_scripts.checkpoints.nemo.prompt_learning import is_prompt_config, with_prompts
from export_scripts.checkpoints.source import Source
from export_scripts.checkpoints.tokenizers.nemo import find_tokenizer
from export_scripts.weights.values import positive
from handover.errors import CheckpointError

NAME = "NeMo (.nemo archive or unpacked directory)"
_WEIGHTS_FILE = "model_weights.ckpt"
_DISTRIBUTED = "model_weights/"
_PREFIX = "model."


def is_candidate(path: Path) -> bool:
    """Whether a path is an archive by its name or an unpacked directory."""
    return (path / CONFIG_FILE).is_file() or (path.suffix == ".nemo" and path.is_file())


def recognises(archive: Archive) -> bool:
    """Whether the files are NeMo's; a file that is no directory is taken for one, so that its faults are named."""
    return CONFIG_FILE in archive or archive.path.is_file()


def open_source(archive: Archive) -> Source:
    """Open a GPT.

    Raises:
        CheckpointError: incomplete, or not a model that FasterTransformer's GPT can express.
    """
    checkpoint = NemoCheckpoint(archive)
    config = checkpoint.config
    if is_prompt_config(config):
        raise CheckpointError(
            f"{archive.path} holds prompt tables, not a GPT", "give a directory that holds them and their model"
        )
    said = key_remarks(config)
    source = gpt_source(
        *(archive, config, lambda: checkpoint.state, _PREFIX, lambda: find_tokenizer(archive, config), said)
    )
    return with_prompts(source, source.family.name)


class NemoCheckpoint:
    """A NeMo checkpoint, opened: configuration and keys are read, weights are not.

    Attributes:
        config: content of ``model_config.yaml``.
    """

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        self.config = read_config(archive)
        if is_distributed(archive, _DISTRIBUTED):
            # Its keys do not depend on the training's ranks and stages.
            self.config = {k: v for k, v in self.config.items() if k != "virtual_pipeline_model_parallel_size"}
        self.tensor_parallel = _parallelism(self.config, "tensor_model_parallel_size")
        self.pipeline_parallel = _parallelism(self.config, "pipeline_model_parallel_size")

    @cached_property
    def state(self) -> State:
        """Its keys and tensors; weights are not read."""
        if is_distributed(self.archive, _DISTRIBUTED):
            return open_distributed(self.archive, _DISTRIBUTED, _without_wrapper)
        return RankFiles(self.archive, self.weight_files(), _without_wrapper)

    def weight_files(self) -> list[list[str]]:
        """Name the file of each pipeline stage, for each tensor-parallel rank."""
        ranks, stages = self.tensor_parallel, self.pipeline_parallel
        if ranks * stages > len(self.archive.sizes):
            raise CheckpointError(
                f"{self.archive.path} has {len(self.archive.sizes)} files",
                f"its configuration says tensor_model_parallel_size {ranks}, pipeline_model_parallel_size {stages}",
            )
        return [self._weight_files(rank) for rank in range(ranks)]

    def _weight_files(self, tensor_rank: int) -> list[str]:
        if self.pipeline_parallel > 1:
            stages = range(self.pipeline_parallel)
            names = [f"tp_rank_{tensor_rank:02d}_pp_rank_{stage:03d}/{_WEIGHTS_FILE}" for stage in stages]
        elif self.tensor_parallel > 1:
            names = [f"mp_rank_{tensor_rank:02d}/{_WEIGHTS_FILE}"]
        else:
            names = [_WEIGHTS_FILE]
        missing = [name for name in names if name not in self.archive]
        if missing:
            raise CheckpointError(
                f"{self.archive.path} lacks {', '.join(missing)}",
                f"its configuration says tensor_model_parallel_size {self.tensor_parallel}, "
                f"pipeline_model_parallel_size {self.pipeline_parallel}",
            )
        return names


def _without_wrapper(key: str) -> str:
    """Drop the wrapper's name, ``model.module.``: some saves with megatron_amp_O2 keep it in every key."""
    model, dot, name = key.partition(".")
    return f"{model}{dot}{name.removeprefix('module.')}"


def read_config(archive: Archive) -> Mapping[str, Any]:
    """Read ``model_config.yaml``; CheckpointError: it is missing or not a mapping in YAML."""
    return read_yaml(archive, CONFIG_FILE)


def _parallelism(config: Mapping[str, Any], key: str) -> int:
    return positive(config.get(key) or 1, f"{CONFIG_FILE}: {key}")
