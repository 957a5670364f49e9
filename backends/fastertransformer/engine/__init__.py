"""Inference over FasterTransformer's shards: torch, numpy and the standard library only. Nothing here knows Triton.

Read in this order. ``model``: what config.ini describes, its weights, and the network. ``ops``: the operations that a
network computes with, in torch or by kernels of our own. ``cache``: keys and values. ``steps``: what generation calls,
one step at a time. ``request``: a client's tensors, checked; they become one ``SamplingParams`` for each row.
``scheduling``: sequences, the batch and the loop over steps; ``sessions`` keeps conversations, ``outputs`` makes the
answers. ``sampling``: logits to tokens. ``parallel``: one network over several processes. ``loading`` builds all of it,
and ``engine`` runs it in a thread.
"""
