"""Inference over FasterTransformer's shards: torch, numpy and the standard library only.

Read in this order: ``checkpoint``: ``config`` (what the model is), ``layouts`` (which shards it has), ``weights``
(shards to tensors). ``network``: ``network`` and ``layers``; ``attention`` over ``cache`` (keys and values), on a GPU
in ``pages``; ``steps`` (what may be asked of it all). ``requests``: ``vocabulary``, ``prompts``, ``words`` and
``request`` (what a client asked for). ``generation``: ``sequence`` (a request on its way), ``sampling`` and ``beam``
(logits to a token), ``choice`` (for all rows at once), ``sessions`` (conversations), ``contexts``, ``batch``
and ``scheduler`` (the loop), ``outputs`` (what is answered). ``engine``: all of it behind a thread. ``ranks`` spreads a
network over several processes, ``parallel`` first; ``kernels`` are a GPU's. Nothing here knows about Triton.
"""
