"""What NeMo-Megatron-Launcher's ``evaluation`` keys and options are called here, for error messages.

The launcher evaluates a checkpoint with a trainer of its own; here clients ask a model that is served, so that what
says which model that is stands below ``export``. Its conf/evaluation was read at commit 4550dc9f.
"""

from __future__ import annotations

from collections.abc import Sequence

_CHECKPOINT = "export.model.checkpoint_path says which model is served and asked"
_BESIDE = (
    "put it beside the model's .nemo and give export.model.checkpoint_path their directory; docs/accuracy.md, SQuAD"
)
_GREEDY = "answers are greedy; evaluation.squad.tokens_to_generate says how long, beam_width is translation's"
_PLACES = "the served model's are meant: export.model.tensor_model_parallel_size and "
_PLACES += "export.triton_deployment.pipeline_model_parallel_size; nodes and tasks follow from them"
_ASKED = "a served model is asked, there is no trainer; leave it out"
_PREDICTIONS = "references stand in data_path (or reference_path), predictions in the results directory; leave it out"
_TOKENIZER = "the tokenizer of the checkpoint is taken; leave it out"

_KEYS = {
    "run.eval_name": "evaluation.run.results_dir says where results go",
    "run.task_name": "evaluation=squad, translation or summarization says what is scored",
    "run.model_train_name": "it is export.run.model_train_name here",
    "run.train_dir": "it is export.run.training_dir here",
    "run.dependency": "it is export.run.dependency here, of every job",
    "run.nodes": _PLACES,
    "run.ntasks_per_node": _PLACES,
    **{f"run.{name}_dir": _BESIDE for name in ("prompt_learning", "adapter_learning", "ia3_learning")},
    "run.fine_tuning_dir": _CHECKPOINT,
    "trainer": _ASKED,
    "exp_manager": _ASKED,
    "inference": _GREEDY,
    "data.test_ds": "it is evaluation.squad.data_path here",
    "data": "it is evaluation.squad.batch_size here",
    "data_paths": "it is evaluation.squad.data_path here",
    "model.prompt_dataset_paths": "it is evaluation.squad.data_path here",
    "model.disable_special_tokens": "evaluation.squad.prompt=FILE asks without the p-tuned task's table",
    "model.data.validation_ds.src_file_name": "it is evaluation.translation.data_path here",
    "model.data.validation_ds.tgt_file_name": "it is evaluation.translation.reference_path here",
    "model.data.validation_ds.global_batch_size": "it is evaluation.model.eval_batch_size here",
    "model.data.validation_ds.micro_batch_size": "it is evaluation.model.eval_batch_size here",
    "model.data.validation_ds.max_tgt_seq_length": "it is evaluation.translation.max_output_len here",
    "model.data": "evaluation=squad, translation or summarization has keys of its own for data",
    **{f"model.{name}": _CHECKPOINT for name in ("nemo_model", "checkpoint_folder", "checkpoint_name", "hparams_file")},
    **{f"model.{name}": _ASKED for name in ("gradient_as_bucket_view", "megatron_amp_O2")},
    **{f"model.{name}": _CHECKPOINT for name in ("restore_from_path", "pretrained_checkpoint", "model_type")},
    "gpt_model_file": _CHECKPOINT,
    "language_model_path": _CHECKPOINT,
    "virtual_prompt_model_file": _BESIDE,
    "adapter_model_file": _BESIDE,
    **{f"{parent}tensor_model_parallel_size": _PLACES for parent in ("", "model.")},
    **{f"{parent}pipeline_model_parallel_size": _PLACES for parent in ("", "model.")},
    **{f"{parent}pipeline_model_parallel_split_rank": _PLACES for parent in ("", "model.")},
    **{f"{parent}model_parallel_size": _PLACES for parent in ("", "model.")},
    "model.precision": "export.model.weight_data_type and export.triton_deployment.data_type are the served model's",
    "model.vocab_file": _TOKENIZER,
    "model.merge_file": _TOKENIZER,
    "ground_truth_file_path": _PREDICTIONS,
    "pred_file_path": _PREDICTIONS,
    "split_string": _PREDICTIONS,
}
HARNESS = (
    "lm-evaluation-harness scores the others on the same server: python -m evaluation.harness run --model slipway "
    "--model_args url=ENDPOINT.json --tasks boolq,piqa,... (docs/accuracy.md)"
)
_P_TUNED = "evaluation=squad evaluation.squad.taskname=squad evaluation.squad.prompt=null"
_SQUAD_T5 = "evaluation=squad; evaluation.squad.prompt=evaluation/prompts/squad_t5.yaml for a T5"


def key_hint(key: str, overrides: Sequence[str]) -> str:
    """Return what a key of the launcher's evaluation is called here; empty for any other.

    Args:
        key: the unknown one, dotted; its section where that is unknown already.
        overrides: of the command line, which may say more than the section.
    """
    given = [text.lstrip("+~").split("=", 1)[0] for text in overrides]
    full = next((name for name in given if name == key or name.startswith(f"{key}.")), key)
    words = full.removeprefix("evaluation.").split(".") if full.startswith("evaluation.") else []
    names = (".".join(words[:count]) for count in range(len(words), 0, -1))
    return next((_KEYS[name] for name in names if name in _KEYS), "")


def option_hint(option: str) -> str:
    """Return which evaluation a file of the launcher's conf/evaluation is here; empty for any other."""
    family, _, name = option.rpartition("/")
    if name == "evaluate_lambada":
        return "it is evaluation=lambada here"
    if name.startswith("evaluate_") and family:
        return f"it is evaluation=lambada here; {HARNESS}"
    if name in ("squad", "xquad") and family:
        return f"it is {_SQUAD_T5 if not family.startswith(('prompt_', 'adapter_', 'ia3_')) else _P_TUNED} here"
    return "translation or summarization read a source and a reference file" if name == "custom_task" else ""
