"""Tune FasterTransformer for a model before it is served: ``python3 -m deployment.gemm_autotune --help``.

gpt_gemm times the matrix products of the model on this GPU and writes the fastest algorithms to gemm_config.ini in
its working directory. FasterTransformer's backend reads that file from the server's working directory, which is the
model's; what was tuned before for other sizes stays in it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from deployment.arguments import GemmAutotuneArguments
from deployment.proof.served_models import ServedModel, find_served_models
from handover.errors import ArtefactError, ServerError, exit_status, nearest

RESULT = "gemm_config.ini"
_DATA_TYPES = {"fp32": 0, "fp16": 1, "bf16": 2}
_APPEND = 1


def gemm_sizes(model: ServedModel, input_length: int, beam_width: int) -> tuple[int, ...]:
    """Compute gpt_gemm's arguments.

    Source of their order: FasterTransformer's ``src/fastertransformer/models/multi_gpu_gpt/gpt_gemm.cc``.

    Args:
        model: gives the largest batch, the dimensions (config.ini) and the type of the computation (config.pbtxt).
        input_length: of the longest prompt, in tokens.
        beam_width: beams of a request.

    Returns:
        batch_size, beam_width, max_input_len, head_number, size_per_head, inter_size, vocab_size, data_type,
        tensor_para_size, is_append.

    Raises:
        ArtefactError: a dimension is missing or no number, or the data type is unknown.
    """
    data_type = model.parameters.get("data_type", "fp32")
    if data_type not in _DATA_TYPES:
        raise ArtefactError(f"{model.name}: data_type is '{data_type}'", nearest(data_type, _DATA_TYPES))
    try:
        head_num, size_per_head, inter_size, vocab_size = (
            int(model.config[key]) for key in ("head_num", "size_per_head", "inter_size", "vocab_size")
        )
    except (KeyError, ValueError) as error:
        raise ArtefactError(f"{model.checkpoint / 'config.ini'} does not say {error}", "export again") from error
    request = (max(1, model.max_batch_size), beam_width, input_length)
    dimensions = (head_num, size_per_head, inter_size, vocab_size)
    return (*request, *dimensions, _DATA_TYPES[data_type], model.tensor_para_size, _APPEND)


def main(argv: Sequence[str]) -> None:
    """Tune for every model of the repository that FasterTransformer's backend serves."""
    arguments = GemmAutotuneArguments.from_argv(argv, __doc__)
    for model in find_served_models(arguments.model_repository, follows_moves=False):
        tune(model, arguments)


def tune(model: ServedModel, arguments: GemmAutotuneArguments) -> None:
    """Run gpt_gemm in the model's directory.

    Raises:
        ServerError: there is no such program, or it failed. It exits with 0 where it does not understand its
            arguments, so what it wrote is looked at.
    """
    sizes = gemm_sizes(model, arguments.input_length, arguments.beam_width)
    result = model.directory / RESULT
    before = result.stat().st_mtime_ns if result.exists() else 0
    try:
        status = subprocess.run([arguments.binary, *map(str, sizes)], cwd=model.directory, check=False).returncode
    except OSError as error:
        raise ServerError(
            f"{arguments.binary} cannot be run: {error.strerror}",
            "gpt_gemm is part of FasterTransformer's container; deployment.gemm_binary says where it is",
        ) from error
    if status or not result.exists() or result.stat().st_mtime_ns == before:
        raise ServerError(
            f"{arguments.binary.name} {' '.join(map(str, sizes))} ended with exit status {status} "
            + ("" if status else f"and wrote no {RESULT}"),
            "see what it printed; deployment.gemm_autotune=false serves without tuning",
        )


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "gemm_autotune"))
