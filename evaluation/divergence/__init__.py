"""Divergence: the served model's log probabilities over a corpus against a reference streamed out of the checkpoint."""
