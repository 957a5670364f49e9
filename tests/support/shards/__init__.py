"""Shards of FasterTransformer, written and computed without the project's own code."""
