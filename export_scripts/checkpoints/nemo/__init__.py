"""NeMo 1.x and 2.x: GPT, T5, and what is saved beside a model."""
