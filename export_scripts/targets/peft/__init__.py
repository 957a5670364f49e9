"""Directories of PEFT: a LoRA adapter by itself, without the weights of its model."""
