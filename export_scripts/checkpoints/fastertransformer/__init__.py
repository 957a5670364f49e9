"""FT checkpoints, to be cut for other ranks."""
