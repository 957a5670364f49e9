"""What a model repository is made of: the FT checkpoint or the Hugging Face directory of a conversion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import models
from export_scripts.arguments import EAGLE3, FP8_CACHE, MTP, ExportArguments
from ft_format.config_ini import FILE_NAME as CONFIG_INI
from ft_format.config_ini import ConfigIni
from ft_format.families import SECTIONS, find_family
from ft_format.families.family import Family
from ft_format.location import HUGGINGFACE
from ft_format.values import COUNT, INDEX
from handover.errors import ArtefactError
from handover.manifest import Manifest
from handover.text_ids import TEXT_IDS_FILE
from models.described import find_model_tensors, fp8_blocks, has_static_inputs, is_mxfp4, quantized_kind
from models.directory import CONFIG_FILE, read_json
from models.engine_limits import (
    beyond_engine,
    cache_problem,
    fp8_problem,
    groups_problem,
    head_problem,
    int8_problem,
    longest_text,
    predictor_problem,
    ranks_problem,
)
from models.predictors import first_predictor

_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model", TEXT_IDS_FILE)
_HUB_KIND = "huggingface"


@dataclass(frozen=True)
class ServedCheckpoint:
    """A checkpoint that a repository can be made of.

    Attributes:
        root: its directory.
        place: where the repository has it, below a model's directory.
        family: FasterTransformer's model.
        start_id, end_id: of the vocabulary.
        vocab_size: of it, padding included.
        positions: of the longest text; 0: as many as the memory has room for (T5, ALiBi).
        tokenizer: files of it that the models for text read.
        made: content of files of the tokenizer by name, in place of the checkpoint's: the whole of what training had,
            and what stands around a text, as in an FT checkpoint.
    """

    root: Path
    manifest: Manifest
    place: str
    family: Family
    start_id: int
    end_id: int
    vocab_size: int
    positions: int
    tokenizer: tuple[str, ...] = ()
    made: Mapping[str, bytes] = field(default_factory=dict)


def open_checkpoint(arguments: ExportArguments) -> ServedCheckpoint:
    """Open what is exported.

    Raises:
        ArtefactError: it is incomplete, has no tokenizer, was made for another tensor_para_size, or is a model that the
            engine does not serve.
    """
    root = arguments.ft_checkpoint
    manifest = Manifest.read(root)
    if problems := manifest.problems(root, check_digests=False):
        raise ArtefactError(f"{root} is not what its manifest says:\n  " + "\n  ".join(problems), "convert again")
    found = (_open_directory if manifest.kind == _HUB_KIND else _open_shards)(root, manifest, arguments)
    names = {*found.tokenizer, *found.made}
    if not {"vocab.json", "merges.txt"} <= names and not {"tokenizer.json", "tokenizer.model"} & names:
        raise ArtefactError(
            f"{root} has no tokenizer: neither tokenizer.json nor vocab.json and merges.txt nor tokenizer.model",
            "put the tokenizer's files into the training checkpoint and convert again",
        )
    if arguments.interactive_sessions and found.family.is_encoder_decoder:
        raise ArtefactError(
            f"{root} holds a model of the family {found.family.name}: an encoder-decoder has no interactive sessions",
            "leave export.triton_deployment.interactive_sessions at 0",
        )
    return found


def _open_shards(root: Path, manifest: Manifest, arguments: ExportArguments) -> ServedCheckpoint:
    """Read the family, which the sections of config.ini tell, and the section that has the ids of start and end."""
    if arguments.fp8_activations:
        raise ArtefactError(f"fp8_activations with {root}, whose weights are not FP8", "leave it out")
    if arguments.speculation in (MTP, EAGLE3):
        problem = predictor_problem(None) if arguments.speculation == MTP else head_problem(None, 1)
        raise ArtefactError(f"{root}: {problem}", "leave speculation out, or take another way")
    if arguments.quantization:
        raise ArtefactError(f"{root}: {fp8_problem(None)}", "convert into export.model.format=huggingface")
    ini = ConfigIni.read(root, ArtefactError)
    family = find_family(ini)
    if family is None:
        raise ArtefactError(
            f"{root / CONFIG_INI} does not describe a model: it has none of the sections {', '.join(SECTIONS)}",
            "convert again",
        )
    section = family.section(ini)
    made_for, ranks = section.find("tensor_para_size", COUNT), arguments.tensor_para_size
    if made_for not in (None, ranks):
        raise ArtefactError(
            f"{root} was made for tensor_para_size {made_for}, not {ranks}",
            "convert again for the tensor_para_size to serve with",
        )
    start_id, end_id = (section.get(key, INDEX) for key in family.id_keys)
    positions, vocab_size = section.get("max_pos_seq_len", INDEX, 0), section.get("vocab_size", COUNT, 0)
    files = tuple(record.path for record in manifest.files if record.path in _TOKENIZER_FILES)
    return ServedCheckpoint(root, manifest, f"1/{ranks}-gpu", family, start_id, end_id, vocab_size, positions, files)


def _open_directory(root: Path, manifest: Manifest, arguments: ExportArguments) -> ServedCheckpoint:
    """Read the directory as a conversion would: its ids, and the tokenizer as the models for text have it.

    That takes the packages of a conversion, which shards do without.
    """
    from export_scripts.checkpoints.formats import find_archive, open_source
    from export_scripts.checkpoints.tokenizers.chat import find_chat
    from export_scripts.conversion.plan.special_ids import with_settled_ids

    said = read_json(root / CONFIG_FILE, ArtefactError)
    are_fp8 = bool(fp8_blocks(root, ArtefactError))
    try:
        decoder = models.find(said.get("model_type"), said).read(said)
    except models.ModelError as error:
        hint = "export.model.format=fastertransformer converts it into shards"
        raise ArtefactError(f"{root} is no model that is served from such a directory: {error.problem}", hint) from None
    problems = [
        ranks_problem(decoder, arguments.tensor_para_size),
        groups_problem(decoder, arguments.tensor_para_size) * is_mxfp4(root, ArtefactError),
        int8_problem(quantized_kind(root, ArtefactError)) * arguments.int8_mode,
        fp8_problem(decoder, are_fp8) * bool(arguments.quantization),
        predictor_problem(decoder) * (arguments.speculation == MTP),
        head_problem(decoder, arguments.pipeline_para_size) * (arguments.speculation == EAGLE3),
        cache_problem(decoder) * (arguments.kv_cache_dtype == FP8_CACHE),
        "fp8_activations with weights of which none is FP8"
        * (arguments.fp8_activations and not (are_fp8 or arguments.quantization)),
        "fp8_activations with scales of activations in the files, by which these are rounded"
        * (arguments.fp8_activations and has_static_inputs(root, ArtefactError)),
    ]
    if beyond := [*beyond_engine(decoder), *filter(None, problems)]:
        listed = "\n  ".join(beyond)
        raise ArtefactError(f"the drop-in engine does not serve {root}\n  {listed}", "take another engine")
    if arguments.speculation == MTP:
        find_model_tensors(root, first_predictor(decoder), ArtefactError, is_part=True)
    source = with_settled_ids(open_source(find_archive(root), for_shards=False))
    tokenizer, ids = source.tokenizer, source.ids
    made = {**tokenizer.contents(source.archive), **tokenizer.text_ids.files(), **find_chat(source).files()}
    where = (root, manifest, f"1/{HUGGINGFACE}")
    own = ids.start_id, ids.end_id, decoder.vocab_size, longest_text(decoder)
    return ServedCheckpoint(*where, source.family, *own, made=made)
