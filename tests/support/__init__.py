"""What tests of several folders share."""

PATIENCE_S = 240.0
"""Seconds of a wait that only guards against a hang; what a test says of time it asserts where it was."""
