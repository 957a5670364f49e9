"""What can be known of a SQuAD evaluation before a server is asked. The login side imports this: no client."""

from __future__ import annotations

from evaluation.arguments import SquadArguments
from evaluation.tasks.prompt_template import Template, read_template
from evaluation.tasks.squad.data import Dataset, read_dataset
from handover.errors import ConfigError

FIELDS = ("context", "question", "answer", "title", "taskname")
"""What a prompt can say of a question."""


def check_squad(arguments: SquadArguments) -> tuple[Dataset, Template | None]:
    """Read the questions and the prompt; None: it is that of a p-tuned task.

    Raises:
        ConfigError: a file is missing or malformed, there are two prompts or none, or no token may be generated.
    """
    if (arguments.prompt is None) is (arguments.taskname is None):
        raise ConfigError(
            f"prompt is {arguments.prompt}, taskname is {arguments.taskname}",
            "give prompt, a YAML file, or taskname, whose template the checkpoint carries; null for the other",
        )
    if arguments.tokens_to_generate < 1:
        raise ConfigError(f"tokens_to_generate is {arguments.tokens_to_generate}", "it is at least 1")
    if arguments.use_request_prompt_embedding and arguments.taskname is None:
        raise ConfigError("use_request_prompt_embedding is of a p-tuned task", "give taskname, or leave it false")
    dataset = read_dataset(arguments.data_path, arguments.samples)
    return dataset, None if arguments.prompt is None else read_template(arguments.prompt, FIELDS)
