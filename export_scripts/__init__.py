"""From a training checkpoint to FasterTransformer shards and a Triton model repository."""
