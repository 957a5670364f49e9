"""Plan the conversion of a training checkpoint into FasterTransformer shards."""

from __future__ import annotations

from export_scripts.arguments import ConvertArguments
from launcher.config.schema import Config
from launcher.plan.paths import RunPaths
from launcher.plan.plan import StagePlan, partial, python_module
from launcher.plan.stages.settings import environment, resources


def convert(config: Config, paths: RunPaths) -> StagePlan:
    """Plan the conversion: one command on one node."""
    model, run = config.export.model, config.export.run
    arguments = ConvertArguments(
        checkpoint=paths.checkpoint,
        output=partial(paths.ft_checkpoint),
        tensor_para_size=model.tensor_model_parallel_size,
        weight_data_type=str(model.weight_data_type),
        processes=model.processes,
        load_checkpoints_to_cpu=model.load_checkpoints_to_cpu,
        allow_nonfinite=model.allow_nonfinite,
        random_weights=model.random_weights or None,
        start_id=model.start_id,
        end_id=model.end_id,
        checkpoint_sha256=model.checkpoint_sha256,
        hub_name=paths.hub_name,
    )
    return StagePlan(
        stage="convert",
        name=f"convert_{run.model_train_name}",
        commands=(python_module("export_scripts.convert", arguments),),
        resources=resources(config, run.time_limit, nodes=1, gpus_per_node=0),
        inputs=() if paths.hub_name else (paths.checkpoint,),
        output=paths.ft_checkpoint,
        log=paths.log("convert"),
        env=environment(config),
    )
