"""The engine and vLLM on the same GPUs, by turns."""
