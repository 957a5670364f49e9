"""The OpenAI API in front of a running Triton server.

It tokenizes by itself and asks the model ``fastertransformer`` directly, so that a request costs less than through the
ensemble. See docs/openai.md for what it honours and what it refuses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from deployment.openai.arguments import OpenAIArguments
from deployment.openai.listening.processes import run_processes
from deployment.openai.listening.server import serve
from handover.errors import exit_status


def main(argv: Sequence[str]) -> None:
    """Serve until stopped."""
    arguments = OpenAIArguments.from_argv(argv, __doc__)
    if arguments.processes > 1:
        run_processes(arguments)
    else:
        asyncio.run(serve(arguments))


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "openai"))
