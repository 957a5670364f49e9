"""Megatron-LM's GPT."""
