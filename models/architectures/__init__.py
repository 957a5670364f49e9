"""A file for each architecture of transformers: its blocks, its names, its keys."""
