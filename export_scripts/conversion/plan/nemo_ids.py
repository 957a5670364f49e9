"""NeMo's own tokenizers, where they are installed (the extra ``nemo``): the authority for NeMo's configurations.

    python3 -m export_scripts.conversion.plan.nemo_ids \
        --directory=... --library=sentencepiece --is-legacy=true < texts.json

They are asked in a process of their own: importing NeMo takes seconds, and torch's memory with it. Without the extra
the same ids come from ``checkpoints/tokenizers/nemo.py``.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from export_scripts.checkpoints.source import Source
from handover.arguments import ScriptArguments
from handover.errors import CheckpointError, exit_status
from models.directory import SpecialIds

LIBRARIES = ("bpe", "sentencepiece")
_PACKAGE = "nemo_toolkit"


@dataclass(frozen=True)
class NemoIdsArguments(ScriptArguments):
    """Ask NeMo's tokenizer; texts come as a JSON list on standard input, the answer is one line of JSON."""

    directory: Path = field(metadata={"help": "holds vocab.json and merges.txt, or tokenizer.model"})
    library: str = field(metadata={"help": "bpe or sentencepiece"})
    is_legacy: bool = field(metadata={"help": "NeMo's sentencepiece_legacy"})


def with_nemos_ids(source: Source) -> tuple[Source, str]:
    """Take start_id and end_id from NeMo's tokenizer if it is installed and the checkpoint is NeMo's.

    Returns:
        The source, and a remark: where NeMo's ids differ from ours, or why it could not be asked; empty otherwise.
    """
    tokenizer = source.tokenizer
    if not tokenizer.is_nemos or tokenizer.library not in LIBRARIES or not is_installed():
        return source, ""
    with TemporaryDirectory(prefix="slipway-") as folder:
        for name, member in tokenizer.members.items():
            (Path(folder) / name).write_bytes(source.archive.read_bytes(member))
        try:
            answer = ask_nemo(NemoIdsArguments(Path(folder), tokenizer.library, tokenizer.is_legacy))
        except CheckpointError as error:
            return source, f"{error.problem}; the ids are those of {tokenizer.library} itself"
    ids = SpecialIds(answer["start_id"], answer["end_id"], source.ids.pad_id)
    differs = f"NeMo's tokenizer says {ids}, {tokenizer.library} itself {source.ids}" if ids != source.ids else ""
    return replace(source, ids=ids), differs


def is_installed() -> bool:
    """Whether NeMo is there."""
    from importlib.metadata import PackageNotFoundError, version  # see ``handover.signatures.sealing``

    try:
        version(_PACKAGE)
    except PackageNotFoundError:
        return False
    return True


def ask_nemo(arguments: NemoIdsArguments, texts: Sequence[str] = ()) -> dict[str, Any]:
    """Ask in a process of its own.

    Returns:
        ``start_id``, ``end_id``, ``vocabulary_size`` and ``ids``, those of each text.

    Raises:
        CheckpointError: NeMo cannot be imported or refuses the files.
    """
    command = [sys.executable, "-m", "export_scripts.conversion.plan.nemo_ids", *arguments.to_argv()]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, input=json.dumps(list(texts)), capture_output=True, text=True, check=False, cwd=root)
    if done.returncode:
        raise CheckpointError(f"NeMo's tokenizer could not be asked: {done.stderr.strip().rpartition(chr(10))[2]}")
    answer: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    return answer


def main(argv: Sequence[str]) -> None:
    """Answer for the files that the arguments name."""
    answer = nemos_answer(NemoIdsArguments.from_argv(argv, description=__doc__), json.load(sys.stdin))
    sys.stdout.write(f"\n{json.dumps(answer)}\n")


def nemos_answer(arguments: NemoIdsArguments, texts: Sequence[str]) -> dict[str, Any]:
    """Ask in this process; see ``ask_nemo``."""
    tokenizer = _load(arguments)
    return {
        "start_id": tokenizer.bos_id,
        "end_id": tokenizer.eos_id,
        "vocabulary_size": len(tokenizer.tokenizer) if arguments.library == "bpe" else tokenizer.original_vocab_size,
        "ids": [tokenizer.text_to_ids(text) for text in texts],
    }


def _load(arguments: NemoIdsArguments) -> Any:
    """Make the tokenizer as NeMo's ``get_nmt_tokenizer`` does, which left NeMo with its language models."""
    tokenizers = importlib.import_module("nemo.collections.common.tokenizers")
    directory = arguments.directory
    if arguments.library == "bpe":
        # In place of the name "gpt2", which would be looked up on the hub.
        (directory / "config.json").write_text('{"model_type": "gpt2"}')
        files = {"vocab_file": str(directory / "vocab.json"), "merges_file": str(directory / "merges.txt")}
        return tokenizers.AutoTokenizer(pretrained_model_name=str(directory), **files)
    model = str(directory / "tokenizer.model")
    tokenizer = tokenizers.SentencePieceTokenizer(model_path=model, legacy=arguments.is_legacy)
    if arguments.is_legacy:
        _add_special_tokens(tokenizer)
    return tokenizer


def _add_special_tokens(tokenizer: Any) -> None:
    """Name the special tokens that NeMo's encoders expect, in the order of FasterTransformer's converters."""
    for name in ("cls", "sep", "mask"):
        tokenizer.add_special_tokens({f"{name}_token": f"<{name}>"})
    pieces = tokenizer.tokenizer
    for name, number in (("pad", pieces.pad_id()), ("bos", pieces.bos_id()), ("eos", pieces.eos_id())):
        if number > 0:
            setattr(tokenizer, f"{name}_token", pieces.id_to_piece(number))
        else:
            tokenizer.add_special_tokens({f"{name}_token": f"<{name}>"})


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "nemo_ids"))
