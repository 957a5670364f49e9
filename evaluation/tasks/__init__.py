"""Tasks that score a served model: prompts, answers, metrics, and the files that they are written to."""
