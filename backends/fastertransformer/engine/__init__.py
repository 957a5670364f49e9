"""Inference over FasterTransformer's shards: torch, numpy and the standard library only. Nothing here knows Triton.

From the ground up; none imports what comes later. ``cache``: keys and values. ``ops``: the operations that a network
computes with, in torch or by kernels of our own. ``parallel``: one network over several processes. ``model``: what
config.ini describes, its weights, and the network. ``request``: a client's tensors, checked; they become one
``SamplingParams`` for each row. ``grammar``: which tokens may follow. ``rows``: the rows of requests while they are
generated. ``steps``: what generation calls, one step at a time. ``sampling``: logits to tokens. ``scheduling``: the
batch and the loop over steps; ``sessions`` keeps conversations, ``outputs`` makes the answers. ``loading`` builds all
of it, and ``engine`` runs it in a thread.
"""
