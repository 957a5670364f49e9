"""Build the Triton model repository of an FT checkpoint, or of a Hugging Face directory.

Where the engine finds its weights: ``model_checkpoint_path`` is ``1/<T>-gpu``, or ``1/huggingface``. Our engine
resolves a relative path against the model's own directory, so the repository may be moved. FasterTransformer's C++
backend (``libfastertransformer.cc``, ModelFactory) opens the path as it is, so relative to the server's working
directory; ``deployment.serve`` therefore starts every server in the model's directory. Started by hand from elsewhere,
that backend says ``Can't load 1/<T>-gpu/config.ini`` and stops; an absolute path in ``config.pbtxt`` serves with both.
Without the parameter it falls back to ``<model>/<version>/<default_model_filename>``, and ``default_model_filename``
names the same directory.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from export_scripts.arguments import ExportArguments
from export_scripts.repository.adapters import written_adapters
from export_scripts.repository.checkpoint import ServedCheckpoint, open_checkpoint
from export_scripts.repository.draft_model import draft_files
from export_scripts.repository.interfaces import gpt, t5
from export_scripts.repository.interfaces.interactive import make_interactive
from export_scripts.repository.interfaces.serving import Serving, alias, can_be_aliased
from export_scripts.repository.names import ENGINE, ENSEMBLE, POSTPROCESSING, PREPROCESSING, check_model_name
from export_scripts.repository.pbtxt import ModelSpec, to_text
from ft_format import byte_pieces
from ft_format.location import DRAFT
from ft_format.weight_format import KEY, find_format
from handover.digests import file_digest
from handover.durable import sync
from handover.endpoint import WEIGHTS_DIGEST
from handover.errors import ArtefactError
from handover.identity import files_of
from handover.manifest import FILE_NAME as MANIFEST_NAME
from handover.manifest import ORIGIN, RANDOM_WEIGHTS, FileRecord, Manifest, artefact_files
from handover.progress import Progress
from handover.provenance import made_by
from handover.signatures.sealing import Seal
from models import peft

KIND = "model_repository"
_SOURCES = Path(__file__).parent / "tokenizer_models"
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS, errno.EACCES)


def build_repository(arguments: ExportArguments) -> Manifest:
    """Write the repository and, last, its manifest.

    Weights and tokenizer files are hard links to those of the checkpoint (copies across file
    systems), so the repository takes no space and keeps its weights when the checkpoint is deleted.
    The records of linked files come from the checkpoint's manifest; nothing is read again.

    Raises:
        ConfigError: the model's name is illegal.
        ArtefactError: see ``open_checkpoint``; or the output directory holds foreign files.
    """
    check_model_name(arguments.model_name)
    seal = Seal.open(arguments)
    opened = open_checkpoint(arguments)
    checkpoint, serving = opened.manifest, _serving(arguments, opened)
    seal.take_up(opened.root)
    draft = draft_files(arguments, opened)
    repository = _Repository(arguments.output, opened)
    interface = t5 if serving.family.is_encoder_decoder else gpt
    identity = {WEIGHTS_DIGEST: checkpoint.digest}
    engine = interface.engine(serving)
    engine = replace(engine, parameters={**engine.parameters, **identity})
    has_alias = arguments.model_name != ENGINE and can_be_aliased(engine)
    engines = [ENGINE, arguments.model_name] if has_alias else [ENGINE]
    files, size = len(engines) * len(checkpoint.files), len(engines) * checkpoint.size_bytes
    with written_adapters(arguments) as adapters, Progress("export", files, "files", size) as bar:
        for name in engines:
            beside = repository.link_draft(f"{name}/{opened.place}", arguments.draft_model, draft)
            repository.link_checkpoint(f"{name}/{opened.place}", bar, beside)
            repository.link_adapters(f"{name}/{opened.place}", adapters)
    repository.add_config(_form(engine, arguments))
    if has_alias:
        named = replace(alias(engine, arguments.model_name), parameters=identity)
        repository.add_ensemble(_form(named, arguments))
    repository.add_tokenizer_model(_form(interface.preprocessing(serving), arguments), _SOURCES / "preprocessing.py")
    repository.add_tokenizer_model(_form(interface.postprocessing(serving), arguments), _SOURCES / "postprocessing.py")
    repository.add_ensemble(_form(replace(interface.ensemble(serving), parameters=identity), arguments))
    return repository.finish(arguments, seal)


def _form(spec: ModelSpec, arguments: ExportArguments) -> ModelSpec:
    """Return the model as it is, or in its stateful form."""
    if not arguments.interactive_sessions:
        return spec
    return make_interactive(spec, arguments.interactive_sessions, arguments.session_idle_s)


class _Repository:
    """The directory as it grows, with the record of every file in it."""

    def __init__(self, root: Path, opened: ServedCheckpoint) -> None:
        self.root, self.opened, self.checkpoint = root, opened, opened.manifest
        self.records: dict[str, FileRecord] = {}
        reopen(root, KIND)

    def link_draft(self, directory: str, root: Path | None, files: Sequence[FileRecord]) -> list[FileRecord]:
        """Link a draft model into the checkpoint's directory; returns the records that this has of it."""
        for record in files:
            assert root
            path = f"{directory}/{DRAFT}/{record.path}"
            link_or_copy(root / record.path, self._clear(path))
            self.records[path] = replace(record, path=path)
        return [replace(record, path=f"{DRAFT}/{record.path}") for record in files]

    def link_checkpoint(self, directory: str, bar: Progress, beside: Sequence[FileRecord]) -> None:
        made = {name: self._write(f"{directory}/{name}", content) for name, content in self.opened.made.items()}
        linked = [record for record in self.checkpoint.files if record.path not in made]
        for record in self.checkpoint.files:
            if record.path not in made:
                self._link(record, f"{directory}/{record.path}")
            bar.advance(size_bytes=record.size_bytes)
        # The checkpoint's manifest goes along, so that the shards can be proved wherever they are moved to. Only what
        # it says of them: where and by which code they were made must not make another model of the same weights.
        kept = {name: value for name, value in self.checkpoint.made_from.items() if name == RANDOM_WEIGHTS}
        records = [*linked, *beside, *(replace(record, path=name) for name, record in made.items())]
        shards = Manifest(self.checkpoint.kind, tuple(sorted(records, key=lambda record: record.path)), kept)
        self._write(f"{directory}/{MANIFEST_NAME}", shards.to_text())

    def link_adapters(self, directory: str, adapters: Mapping[str, Path]) -> None:
        for name, source in adapters.items():
            for file in (peft.CONFIG_FILE, peft.WEIGHTS_FILE):
                path = f"{directory}/{peft.DIRECTORY}/{name}/{file}"
                target = self._clear(path)
                link_or_copy(source / file, target)
                self._record(path, target)

    def add_config(self, spec: ModelSpec) -> None:
        comment = (
            f"Written by Slipway's export. Names and shapes: FasterTransformer backend's GPT guide.\n{_note(spec)}"
        )
        self._write(f"{spec.name}/config.pbtxt", to_text(spec, comment.strip()))

    def add_ensemble(self, spec: ModelSpec) -> None:
        self.add_config(spec)
        self._write(f"{spec.name}/1/.keep", "")  # Triton wants a version directory, git and rsync want a file

    def add_tokenizer_model(self, spec: ModelSpec, source: Path) -> None:
        self.add_config(spec)
        self._copy(source, f"{spec.name}/1/model.py")
        for module in (_SOURCES / "slipway_tokenizer.py", _SOURCES / "slipway_words.py", Path(byte_pieces.__file__)):
            self._copy(module, f"{spec.name}/1/{module.name}")
        for record in self.checkpoint.files:
            if record.path in self.opened.tokenizer:
                self._link(record, f"{spec.name}/1/{record.path}")
        for name, content in self.opened.made.items():
            self._write(f"{spec.name}/1/{name}", content)

    def finish(self, arguments: ExportArguments, seal: Seal) -> Manifest:
        self._refuse_foreign_files()
        settings = {
            name: getattr(arguments, name)
            for name in ("model_name", "tensor_para_size", "pipeline_para_size", "data_type", KEY,
                         "enable_custom_all_reduce", "max_batch_size", "max_queue_delay_us", "decoupled",
                         "interactive_sessions", "session_idle_s", "request_timeout_s", "tokenizer_instances",
                         "text_deltas", "kv_cache_dtype", "quantization", "fp8_activations", "prefill_chunk_tokens",
                         "speculation", "max_speculative_tokens", "adapters", "max_adapters", "max_adapter_rank")
        }  # fmt: skip
        settings["draft_model"] = arguments.draft_model and str(arguments.draft_model)
        made_from = {
            self.checkpoint.kind: str(self.opened.root),
            f"{self.checkpoint.kind}_digest": self.checkpoint.digest,
            ORIGIN: {**self.checkpoint.made_from, **self.checkpoint.made_by},
            **settings,
        }
        if self.checkpoint.made_from.get(RANDOM_WEIGHTS):
            made_from[RANDOM_WEIGHTS] = True
        records = tuple(self.records[path] for path in sorted(self.records))
        manifest = Manifest(KIND, records, made_from=made_from, made_by=made_by())
        materials = source_files(self.checkpoint, self.opened.root)
        for name, path in arguments.adapters or ():
            files = files_of(Path(path))
            materials |= {f"adapters/{name}/{inner or Path(path).name}": file for inner, file in files.items()}
        if draft := arguments.draft_model:
            materials |= {f"{DRAFT}/{inner}": file for inner, file in files_of(draft).items()}
        seal.finish("export", self.root, manifest, materials)
        return manifest

    def _link(self, record: FileRecord, path: str) -> None:
        link_or_copy(self.opened.root / record.path, self._clear(path))
        self.records[path] = replace(record, path=path)

    def _copy(self, source: Path, path: str) -> None:
        self._record(path, shutil.copyfile(source, self._clear(path)))

    def _write(self, path: str, content: str | bytes) -> FileRecord:
        target = self._clear(path)
        target.write_bytes(content.encode() if isinstance(content, str) else content)
        return self._record(path, target)

    def _record(self, path: str, target: Path) -> FileRecord:
        self.records[path] = FileRecord(path, target.stat().st_size, file_digest(target))
        return self.records[path]

    def _clear(self, path: str) -> Path:
        # Unlink first: writing through a hard link of an earlier attempt would alter the checkpoint.
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        return target

    def _refuse_foreign_files(self) -> None:
        foreign = sorted(set(artefact_files(self.root)) - self.records.keys())
        if foreign:
            listed = "".join(f"\n  {name}" for name in foreign[:10])
            raise ArtefactError(
                f"{self.root} holds {len(foreign)} files that export did not write:{listed}",
                "give an empty directory, or move them away",
            )


def source_files(manifest: Manifest, root: Path) -> dict[str, Path]:
    """Name the files that an export is made from, for its provenance."""
    return {record.path: root / record.path for record in manifest.files}


def link_or_copy(source: Path, target: Path) -> None:
    """Link a file under another name, in the place of what has it; across file systems it is copied."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        shutil.copyfile(source, target)


def reopen(root: Path, kind: str) -> None:
    """Take the manifest from a repository that is built again: until it has one it is not finished.

    Raises:
        ArtefactError: the directory is another artefact.
    """
    if not (root / MANIFEST_NAME).is_file():
        return
    found = Manifest.read(root).kind
    if found != kind:
        raise ArtefactError(
            f"{root} is no {kind.replace('_', ' ')} but has a manifest, of kind {found}", "give an empty directory"
        )
    (root / MANIFEST_NAME).unlink()
    sync(root)


def _serving(arguments: ExportArguments, checkpoint: ServedCheckpoint) -> Serving:
    return Serving(
        family=checkpoint.family,
        tensor_para_size=arguments.tensor_para_size,
        pipeline_para_size=arguments.pipeline_para_size,
        data_type=arguments.data_type,
        weights=find_format(arguments.int8_mode),
        enable_custom_all_reduce=arguments.enable_custom_all_reduce,
        model_checkpoint_path=checkpoint.place,
        max_batch_size=arguments.max_batch_size,
        max_queue_delay_us=arguments.max_queue_delay_us,
        decoupled=arguments.decoupled,
        start_id=checkpoint.start_id,
        end_id=checkpoint.end_id,
        # No longer text has as few tokens as the model has positions: a token of byte-level BPE, the longest there are,
        # stands for 128 bytes at most.
        max_text_bytes=128 * checkpoint.positions or 1 << 20,
        tokenizer_instances=arguments.tokenizer_instances,
        text_deltas=arguments.text_deltas,
        request_timeout_s=arguments.request_timeout_s,
        prefill_chunk_tokens=arguments.prefill_chunk_tokens,
        kv_cache_dtype=arguments.kv_cache_dtype,
        quantization=arguments.quantization,
        fp8_activations=int(arguments.fp8_activations) or None,
        speculation=arguments.speculation,
        max_speculative_tokens=arguments.max_speculative_tokens,
        max_adapters=arguments.max_adapters,
        max_adapter_rank=arguments.max_adapter_rank,
    )


def _note(spec: ModelSpec) -> str:
    if spec.name == ENGINE:
        return (
            "model_checkpoint_path is relative to this directory. FasterTransformer's own backend takes it\n"
            "relative to the server's working directory: start it here, or write an absolute path."
        )
    if spec.name in (PREPROCESSING, POSTPROCESSING, ENSEMBLE):
        return ""
    return f"The model '{ENGINE}' under a second name: same tensors, same weights in memory."
