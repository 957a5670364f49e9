"""The tokenizer's files of a checkpoint, and its special ids."""
