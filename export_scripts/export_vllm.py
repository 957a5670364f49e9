"""Export a Hugging Face directory for Triton's vLLM backend: ``python3 -m export_scripts.export_vllm --help``."""

from __future__ import annotations

from collections.abc import Sequence

from export_scripts.arguments import ExportVllmArguments
from export_scripts.repository.vllm_repository import build_vllm_repository
from handover.errors import exit_status
from handover.progress import say


def main(argv: Sequence[str]) -> None:
    """Build the repository that the arguments describe."""
    arguments = ExportVllmArguments.from_argv(argv, __doc__)
    manifest = build_vllm_repository(arguments)
    say(f"export     {len(manifest.files)} files  {manifest.digest[:19]}  {arguments.output}")


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "export"))
