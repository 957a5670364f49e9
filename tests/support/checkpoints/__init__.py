"""Checkpoints in the forms of those who trained them, written by tests."""
