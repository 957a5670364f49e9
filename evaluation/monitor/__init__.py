"""Monitor: a deployment's own requests scored again by a reference, and an alarm by a sequential test."""
