"""Score a served model on a task: prompts, answers, the task's figures, and the files that hold them."""
