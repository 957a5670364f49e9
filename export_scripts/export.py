"""Export an FT checkpoint as a Triton model repository: ``python3 -m export_scripts.export --help``."""

from __future__ import annotations

from collections.abc import Sequence

from export_scripts.arguments import ExportArguments
from export_scripts.repository.model_repository import build_repository
from handover.errors import exit_status


def main(argv: Sequence[str]) -> None:
    """Build the repository that the arguments describe."""
    arguments = ExportArguments.from_argv(argv, __doc__)
    manifest = build_repository(arguments)
    print(f"      export     {len(manifest.files)} files  {manifest.digest[:19]}  {arguments.output}")


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "export"))
