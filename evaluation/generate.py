"""Complete prompts on a running deployment.

python -m evaluation.generate --prompts "Thank you for" "Q: Are you going for lunch?" --output-len 32
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from evaluation.client import Client
from evaluation.served_model import DEFAULT_RESULTS, DEFAULT_URL, find_endpoint, inspect_endpoint
from evaluation.tensors import Sampling
from evaluation.tokenizer import load_tokenizer
from handover.endpoint import Endpoint
from handover.errors import ConfigError, exit_status


def main(argv: Sequence[str]) -> None:
    """Generate and print one block a prompt: the prompt, then its completion."""
    arguments = _parse(argv)
    sampling = Sampling(
        arguments.top_k, arguments.top_p, arguments.temperature, arguments.repetition_penalty, arguments.random_seed
    )
    endpoint = find_endpoint(arguments.endpoint)
    with Client(endpoint.grpc_url, arguments.timeout_s) as client:
        texts = complete(client, endpoint, arguments.model, arguments.prompts, arguments.output_len, sampling)
    print("\n\n".join(f"> {prompt}\n{text}" for prompt, text in zip(arguments.prompts, texts, strict=True)))


def complete(
    client: Client, endpoint: Endpoint, model: str, prompts: Sequence[str], output_length: int, sampling: Sampling
) -> list[str]:
    """Complete prompts through a text model or, with the tokenizer on this machine, a token id model.

    Returns:
        For each prompt what follows it, without the prompt where the answer begins with it.

    Raises:
        ConfigError: the model takes neither text nor token ids.
        ServerError: the server is unreachable, refuses or fails.
    """
    interface = client.describe(model)
    if interface.takes_text:
        answers = client.generate_text(prompts, output_length, model=model, sampling=sampling)
        return [answer.removeprefix(prompt) for prompt, answer in zip(prompts, answers, strict=True)]
    directory = inspect_endpoint(endpoint, interface.parameters).directory
    if not interface.takes_ids or directory is None:
        raise ConfigError(f"model '{model}' cannot be asked with text from here", "take --model=ensemble")
    tokenizer = load_tokenizer(directory)
    generations = client.generate_ids(
        [tokenizer.encode(prompt) for prompt in prompts], output_length, model=model, sampling=sampling
    )
    return [tokenizer.decode(generation.tokens) for generation in generations]


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m evaluation.generate",
        description="Complete prompts on a running deployment.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--prompts", nargs="+", required=True, metavar="TEXT", help="one or more prompts")
    parser.add_argument(
        "--endpoint",
        help=f"endpoint.json, its directory, or host:port of gRPC (None: the newest below ./{DEFAULT_RESULTS}, "
        f"else {DEFAULT_URL})",
    )
    parser.add_argument("--output-len", type=int, default=32, help="tokens to generate")
    parser.add_argument("--model", default="ensemble", help="Triton's name of the model to ask")
    parser.add_argument("--top-k", type=int, default=1, help="candidates; 1 is greedy, 0 leaves the choice to top-p")
    parser.add_argument("--top-p", type=float, default=0.0, help="probability mass of the candidates; 0 for off")
    parser.add_argument("--temperature", type=float, default=1.0, help="divisor of the logits")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, help="1 for none")
    parser.add_argument("--random-seed", "--seed", type=int, default=0, help="of the sampling")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="limit of the request, seconds")
    return parser.parse_args(list(argv))


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "generate"))
