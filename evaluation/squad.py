"""Evaluate a deployment on SQuAD: ``python3 -m evaluation.squad --endpoint=... --output=... --data-path=...``.

Writes what ``evaluation.tasks.outcome`` lists, and ``predictions.json`` as the official scripts read it, into the
output directory.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from evaluation.arguments import SquadArguments
from evaluation.client.model_connection import Continuation
from evaluation.client.tokenizer import Tokenizer
from evaluation.tasks.outcome import Outcome
from evaluation.tasks.prompt_learning import read_task
from evaluation.tasks.prompt_template import Template
from evaluation.tasks.prompting import Completer, Prompt, Prompter
from evaluation.tasks.squad.data import FIELDS, Question, check_squad
from evaluation.tasks.squad.score import QuestionScore, exact_match, f1_score, summarise
from evaluation.tasks.target import find_target, find_tokenizer
from handover.digests import file_digest
from handover.errors import exit_status

TASK = "squad"
PREDICTIONS_NAME = "predictions.json"


def main(argv: Sequence[str]) -> None:
    """Evaluate, write the results, and fail if any question has no score."""
    arguments = SquadArguments.from_argv(argv, description=__doc__)
    dataset, template = check_squad(arguments)
    learnt = None
    target = find_target(TASK, arguments)
    tokenizer = find_tokenizer(target, arguments.tokenizer)
    if arguments.taskname is not None:
        brings_table = arguments.use_request_prompt_embedding
        template, learnt = read_task(target.served.directory, arguments.taskname, FIELDS, brings_table)
    assert template is not None
    length = arguments.tokens_to_generate
    prompter = Prompter(template, tokenizer, target, length, learnt)
    prompts = [prompter.write(_sample(question, arguments.taskname)) for question in dataset.questions]
    if cut := sum(1 for prompt in prompts if prompt.cut_tokens):
        limit = target.served.max_positions
        print(f"{cut} of {len(prompts)} passages are cut at their end to the model's {limit} positions")
    answers = Completer(target, arguments, tokenizer, length, learnt).complete(prompts)
    scores = [
        score_question(index, question, prompt, answer, template, tokenizer, dataset.version)
        for index, (question, prompt, answer) in enumerate(zip(dataset.questions, prompts, answers, strict=True))
    ]
    digest = file_digest(arguments.data_path).removeprefix("sha256:")
    outcome = Outcome(
        task=TASK,
        metrics=summarise(scores, dataset.version),
        samples=scores,
        cut_contexts=cut,
        data={"file": arguments.data_path.name, "sha256": digest, "known_as": f"SQuAD v{dataset.version}"},
        settings={
            "prompt": template.prompt_template,
            "shots": len(template.examples),
            "taskname": arguments.taskname or "",
            "use_request_prompt_embedding": arguments.use_request_prompt_embedding,
            "tokens_to_generate": length,
        },
    )
    predictions = {score.id: score.prediction for score in scores if not score.error}
    content = json.dumps(predictions, indent=1, ensure_ascii=False) + "\n"
    outcome.write(arguments.output, target, {PREDICTIONS_NAME: content})
    outcome.show()


def score_question(
    index: int,
    question: Question,
    prompt: Prompt,
    answer: Continuation | str,
    template: Template,
    tokenizer: Tokenizer,
    version: str,
) -> QuestionScore:
    """Score one question from the model's answer; a str is the error in place of an answer."""
    score = QuestionScore(index, question.id, bool(question.answers), len(prompt.ids), prompt.cut_tokens)
    if isinstance(answer, str):
        return replace(score, error=answer)
    prediction = template.read_answer(answer.text)
    identity = None
    if question.answers:
        label = tuple(tokenizer.encode_part(template.label(question.answers[0])))
        identity = answer.tokens[: len(label)] == label
    exact, f1 = (of(prediction, question.answers, version) for of in (exact_match, f1_score))
    return replace(score, prediction=prediction, exact=exact, f1=f1, token_identity=identity)


def _sample(question: Question, taskname: str | None) -> dict[str, str]:
    texts = {"context": question.context, "question": question.question, "title": question.title}
    return {**texts, "taskname": taskname or ""}


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "evaluate"))
