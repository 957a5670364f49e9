"""Forms other than FasterTransformer's that a checkpoint is written in."""
