"""Several processes that serve one model, and the GPUs of each."""
