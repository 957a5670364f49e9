"""Complete prompts on a running deployment.

python -m evaluation.generate --prompts "Thank you for" "Q: Are you going for lunch?" --output-len 32
python -m evaluation.generate --stream --prompts "Thank you for"
python -m evaluation.generate --session --stream
"""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from evaluation.client.client import Client
from evaluation.client.conversation import Conversation, show, stream_text
from evaluation.client.openai_client import COMPLETIONS, OpenAIClient
from evaluation.client.openai_connection import sampling_fields
from evaluation.client.request_tensors import Sampling, prepare_ids
from evaluation.client.served_identity import DEFAULT_RESULTS, DEFAULT_URL, find_endpoint
from evaluation.client.served_model import inspect_endpoint
from evaluation.client.tokenizer import load_tokenizer
from handover.endpoint import Endpoint
from handover.errors import ConfigError, exit_status

_SESSION_LEN = 1024
"""Length of a session in tokens if the model's limit is unknown."""


def main(argv: Sequence[str]) -> None:
    """Generate and print one block a prompt: the prompt, then its completion."""
    arguments = _parse(argv)
    sampling = Sampling(
        arguments.top_k, arguments.top_p, arguments.temperature, arguments.repetition_penalty, arguments.random_seed
    )
    endpoint = find_endpoint(arguments.endpoint, key_env=arguments.endpoint_key_env)
    if endpoint.is_openai:
        _through_api(endpoint, arguments, sampling)
        return
    with Client(endpoint.grpc_url, arguments.timeout_s) as client:
        if arguments.session is not None:
            converse(client, endpoint, arguments, sampling)
            return
        if arguments.stream:
            for prompt in arguments.prompts:
                print(f"> {prompt}")
                show(stream_text(client, arguments.model, prompt, arguments.output_len, sampling), arguments.stream)
            return
        texts = complete(client, endpoint, arguments.model, arguments.prompts, arguments.output_len, sampling)
    print("\n\n".join(f"> {prompt}\n{text}" for prompt, text in zip(arguments.prompts, texts, strict=True)))


def _through_api(endpoint: Endpoint, arguments: argparse.Namespace, sampling: Sampling) -> None:
    """Complete prompts through an OpenAI API, which encodes them itself."""
    if arguments.session is not None:
        raise ConfigError(f"{endpoint.openai_url} keeps no conversations", "leave --session out, or give host:port")
    with OpenAIClient(endpoint, arguments.timeout_s) as client:
        model = client.find_model(arguments.model).id
        fields = {**sampling_fields(sampling), "max_tokens": arguments.output_len}
        for number, prompt in enumerate(arguments.prompts):
            sys.stdout.write(f"> {prompt}\n" if arguments.stream or not number else f"\n> {prompt}\n")
            if arguments.stream:
                show(_texts_so_far(client, {"model": model, "prompt": prompt, **fields}), is_streaming=True)
            else:
                sys.stdout.write(f"{client.complete(model, [prompt], **fields).choices[0].text}\n")


def _texts_so_far(client: OpenAIClient, body: dict[str, Any]) -> Iterator[str]:
    text = ""
    for event in client.stream(COMPLETIONS, body):
        text += "".join(str(choice.get("text") or "") for choice in event.get("choices") or ())
        yield text


def complete(
    client: Client, endpoint: Endpoint, model: str, prompts: Sequence[str], output_length: int, sampling: Sampling
) -> list[str]:
    """Complete prompts through a text model or, with the tokenizer on this machine, a token id model.

    Returns:
        For each prompt its completion, without the prompt where the answer begins with it; of an encoder-decoder, the
        whole answer.

    Raises:
        ConfigError: the model takes neither text nor token ids.
        ServerError: the server is unreachable, refuses or fails.
    """
    interface = client.describe(model)
    if interface.takes_text:
        answers = client.generate_text(prompts, output_length, model=model, sampling=sampling)
        if interface.is_encoder_decoder:
            return answers
        return [answer.removeprefix(prompt) for prompt, answer in zip(prompts, answers, strict=True)]
    directory = inspect_endpoint(endpoint, interface.parameters).directory
    if not interface.takes_ids or directory is None:
        raise ConfigError(f"model '{model}' cannot be asked with text from here", "take --model=ensemble")
    tokenizer = load_tokenizer(directory)
    request = prepare_ids(
        [tokenizer.encode(prompt) for prompt in prompts],
        output_length,
        sampling=sampling,
        is_encoder_decoder=interface.is_encoder_decoder,
    )
    generations = client.generate(request, model)
    return [tokenizer.decode(generation.tokens) for generation in generations]


def converse(client: Client, endpoint: Endpoint, arguments: argparse.Namespace, sampling: Sampling) -> None:
    """Continue one session with a prompt for each turn: the given ones, or the lines of standard input.

    Raises:
        ConfigError: the model has no sessions, or takes no text.
        ServerError: the server is unreachable, refuses or fails.
    """
    interface = client.describe(arguments.model)
    if not interface.has_sessions or not interface.takes_text:
        raise ConfigError(
            f"model '{arguments.model}' keeps no conversations",
            "export with export.triton_deployment.interactive_sessions=8 and deploy that repository",
        )
    limit = arguments.session_len or inspect_endpoint(endpoint, interface.parameters).max_positions or _SESSION_LEN
    conversation = Conversation(
        client, arguments.model, arguments.session or secrets.randbits(48) + 1, limit, arguments.memory_len or limit
    )
    prompts: Sequence[str] = arguments.prompts or ()
    for index, prompt in enumerate(prompts or map(str.rstrip, sys.stdin)):
        print(f"> {prompt}")
        is_last = bool(prompts) and index == len(prompts) - 1
        show(conversation.say(prompt, arguments.output_len, sampling, is_last), arguments.stream)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m evaluation.generate",
        description="Complete prompts on a running deployment.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--prompts", nargs="+", metavar="TEXT", help="one or more prompts; with --session the lines of standard input"
    )
    parser.add_argument("--stream", action="store_true", help="print text as it comes, from a decoupled model")
    parser.add_argument(
        "--session", nargs="?", const="", metavar="NAME", help="the prompts are turns of one conversation, with a "
        "model that keeps its state in the server",
    )  # fmt: skip
    parser.add_argument("--session-len", type=int, help="tokens of the conversation at most (None: the model's limit)")
    parser.add_argument("--memory-len", type=int, help="tokens that are remembered, the last ones (None: all)")
    parser.add_argument(
        "--endpoint",
        help=f"endpoint.json, its directory, host:port of gRPC, or http://host:port/v1 (None: the newest below "
        f"./{DEFAULT_RESULTS}, else {DEFAULT_URL})",
    )
    parser.add_argument("--endpoint-key-env", help="environment variable with the bearer key of an OpenAI API")
    parser.add_argument("--output-len", type=int, default=32, help="tokens to generate")
    parser.add_argument("--model", default="ensemble", help="Triton's name of the model to ask")
    parser.add_argument("--top-k", type=int, default=1, help="candidates; 1 is greedy, 0 leaves the choice to top-p")
    parser.add_argument("--top-p", type=float, default=0.0, help="probability mass of the candidates; 0 for off")
    parser.add_argument("--temperature", type=float, default=1.0, help="divisor of the logits")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, help="1 for none")
    parser.add_argument("--random-seed", "--seed", type=int, default=0, help="of the sampling")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="limit of the request, seconds")
    arguments = parser.parse_args(list(argv))
    if arguments.prompts is None and arguments.session is None:
        parser.error("give --prompts, or --session to be asked for them")
    return arguments


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "generate"))
