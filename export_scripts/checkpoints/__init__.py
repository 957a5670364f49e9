"""Readers of training checkpoints: lazy tensors, the model's dimensions, the tokenizer's files."""
