"""Tasks, loads, tokenizers and results of the measurements."""
