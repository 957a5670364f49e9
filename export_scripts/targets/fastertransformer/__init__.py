"""FasterTransformer's shards: a file for each rank of each tensor, and config.ini."""
