"""Prove the weights before anything is started.

FasterTransformer warns about a shard that it cannot open and serves random numbers in its place. So the list of shards
of every family is computed here, from config.ini, the family's table and tensor_para_size alone. Each shard must be
there with its size; where a manifest records it, every byte is compared with its digest too. So is every file of a
Hugging Face directory, whose headers must name the tensors of its config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path

from deployment.proof.files import WEIGHTS
from deployment.proof.served_models import ServedModel
from ft_format.config_ini import ConfigIni
from ft_format.families import BY_MODEL_TYPE, find_family
from ft_format.families.family import DATA_TYPE, Family, loaded_tensors
from ft_format.layout import file_sizes
from ft_format.location import is_hub_directory
from handover.digests import file_digest
from handover.errors import ArtefactError
from handover.manifest import FILE_NAME as MANIFEST_NAME
from handover.manifest import FileRecord, Manifest
from handover.progress import Progress
from models.described import find_model_tensors, read_directory
from models.engine_limits import ranks_problem

_MOST_LISTED = 40


def expected_shards(
    ini: ConfigIni, family: Family, tensor_para_size: int, has: Callable[[str], bool]
) -> dict[str, int]:
    """Compute which files FasterTransformer opens, and their sizes.

    Args:
        ini: the model's config.ini.
        family: of the model; its tensors are those of ``ft_format.families``.
        tensor_para_size: number of shards of each split tensor.
        has: whether there are files of a tensor; the presence of a head's file alone tells FasterTransformer that the
            head is not the embedding.

    Returns:
        File name to bytes.

    Raises:
        ArtefactError: a key is missing or not legal, or tensor_para_size does not divide the model.
    """
    dims, tensors = loaded_tensors(family, ini, has)
    sizes = {name: getattr(dims, name) for name in dict.fromkeys((*family.divided, family.kv_heads))}
    if any(size % tensor_para_size for size in sizes.values()):
        raise ArtefactError(
            f"tensor_para_size {tensor_para_size} does not divide "
            + " and ".join(f"{name} {size}" for name, size in sizes.items()),
            "export the FT checkpoint of a tensor_para_size that divides them",
        )
    return file_sizes(tensors, dims, tensor_para_size, ini[family.main].get("weight_data_type", DATA_TYPE, "fp32"))


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

    def has(name: str) -> bool:
        # A recorded head that is not there is missing: FasterTransformer would take the model for a tied one.
        return f"{name}.bin" in records or (model.checkpoint / f"{name}.bin").is_file()

    # A recorded shard is proved too where no loader opens it.
    shards = {name: record.size_bytes for name, record in records.items() if name.endswith(WEIGHTS)}
    if is_hub_directory(model.checkpoint):
        shards = _files_of_tensors(model) | shards
    else:
        ini = ConfigIni.read(model.checkpoint, ArtefactError)
        shards |= expected_shards(ini, _family(model, ini), model.tensor_para_size, has)
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


def _files_of_tensors(model: ServedModel) -> dict[str, int]:
    """List the files of a Hugging Face directory and their sizes; ArtefactError: they lack a tensor of its config.json.

    Ranks take slices of whole tensors, so that any number that divides the model may share them.
    """
    decoder = read_directory(model.checkpoint, ArtefactError).decoder
    if problem := ranks_problem(decoder, model.tensor_para_size):
        raise ArtefactError(f"config.pbtxt of '{model.name}': {problem}", "take another tensor_para_size")
    found = find_model_tensors(model.checkpoint, decoder, ArtefactError)
    return {file: (model.checkpoint / file).stat().st_size for file in {place.file for place in found.values()}}


def _family(model: ServedModel, ini: ConfigIni) -> Family:
    """Return the family that the backend will load: model_type tells an encoder that is served alone from its T5."""
    named = BY_MODEL_TYPE.get(model.parameters.get("model_type", "").lower())
    found = named if named and named.main in ini else find_family(ini)
    assert found is not None, "find_served_models has refused what is of no family"
    return found


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
            pool.submit(file_digest, model.checkpoint / name, record.digest): name for name, record in records.items()
        }
        for future in as_completed(digests):
            record = records[name := digests[future]]
            if future.result() != record.digest:
                owner = owners.get(future.result())
                problems[name] = (
                    f"content is that of {owner}"
                    if owner
                    else (f"content differs from its digest {record.digest[:19]}")
                )
            bar.advance(size_bytes=record.size_bytes)
    return problems
