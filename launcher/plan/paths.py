"""The only place that joins result paths."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from export_scripts.checkpoints.huggingface.hub import hub_name, local_directory
from handover.endpoint import FILE_NAME as ENDPOINT_FILE
from launcher.config.schema import Config


@dataclass(frozen=True)
class RunPaths:
    """Where a run reads and writes, all absolute.

    ::

        <base_results_dir>/<model_train_name>/
            ft_tp<T>_<weight>/<T>-gpu/            convert: the FT checkpoint
            hf_<weight>/                          convert with export.model.format=huggingface or for an engine that
                                                  reads it: the directory; vllm and the like serve it as it is;
                                                  hf_<weight>_fp8 and the like where weights are quantized
            peft_<weight>/                        convert with export.adapter.format=peft: the adapter, in their place
            export_tp<T>_pp<P>_<weight>_<data>/   run.results_dir; with _int8 and the like where that is asked for
                model_repo/                       export: the Triton model repository
                deployment/                       deploy: endpoint.json, server.log
                evaluation/<task>/                evaluate
                benchmark/<name>/                 benchmark
                report/                           report.md, report.html
                logs/<stage>.log, logs/stages.json
    """

    project: Path
    mounts: tuple[Path, ...]  # what a container sees: repository, data if there is any, results
    checkpoint: Path
    adapter: Path | None  # to be merged into that checkpoint
    tokenizer: Path | None  # in the place of that checkpoint's own
    hub_name: str | None  # of the checkpoint on huggingface.co, fetched to that path where the stage runs
    ft_checkpoint: Path
    huggingface: Path
    peft: Path
    results: Path
    model_repository: Path
    deployment: Path
    endpoint: Path
    evaluation: Path
    benchmark: Path
    report: Path
    stages: Path

    @classmethod
    def of(cls, config: Config) -> RunPaths:
        """Derive the paths of a run from its configuration."""
        model, run = config.export.model, config.export.run
        tensor_para_size = model.tensor_model_parallel_size
        results = _absolute(run.results_dir)
        train_root = _absolute(config.base_results_dir) / run.model_train_name
        ft_name = f"ft_tp{tensor_para_size}_{model.weight_data_type}" + ("_random" if model.random_weights else "")
        deployment = _absolute(config.deployment.run.results_dir)
        name = hub_name(model.checkpoint_path)
        huggingface = train_root / "_".join(map(str, filter(None, ("hf", model.weight_data_type, model.quantization))))
        repository = _absolute(config.export.triton_deployment.triton_model_dir).parent
        data = _absolute(config.data_dir)
        return cls(
            project=_absolute(config.launcher_scripts_path),
            mounts=(
                _absolute(config.launcher_scripts_path),
                *((data,) if name or data.is_dir() else ()),
                _absolute(config.base_results_dir),
            ),
            checkpoint=local_directory(name, data) if name else _absolute(model.checkpoint_path),
            adapter=_absolute(model.adapter_path) if model.adapter_path else None,
            tokenizer=_absolute(model.tokenizer) if model.tokenizer else None,
            hub_name=name,
            ft_checkpoint=train_root / ft_name / f"{tensor_para_size}-gpu",
            huggingface=huggingface,
            peft=train_root / f"peft_{model.weight_data_type}",
            results=results,
            model_repository=huggingface if config.deployment.engine.is_program else repository,
            deployment=deployment,
            endpoint=deployment / ENDPOINT_FILE,
            evaluation=_absolute(config.evaluation.run.results_dir),
            benchmark=_absolute(config.benchmark.run.results_dir),
            report=results / "report",
            stages=results / "logs" / "stages.json",
        )

    def log(self, stage: str) -> Path:
        """Log file of a stage."""
        return self.results / "logs" / f"{stage}.log"


def _absolute(path: str) -> Path:
    """Relative paths in the configuration are relative to where main.py was started."""
    return Path(path).expanduser().absolute()
