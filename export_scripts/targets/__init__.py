"""The forms that a checkpoint is written in."""
