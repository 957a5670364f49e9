"""Tiny models of transformers, and what they and PEFT compute."""
