"""Inference over FasterTransformer's shards: torch, numpy and the standard library only.

Read in this order: ``config`` (what the model is) -> ``layouts`` (which shards it has) -> ``weights`` (shards to
tensors) -> ``network`` with ``attention`` over ``cache`` (keys and values) -> ``sampling`` and ``beam`` (logits to a
token) -> ``words`` (what must not come, what ends a row) -> ``vocabulary``, ``prompts`` and ``request`` (what a client
asked for) -> ``sequence`` (a request on its way), ``slots`` (sampling's state on the device), ``sessions``
(conversations), ``steps``, ``contexts`` and ``scheduler`` (the loop) -> ``engine`` (all of it behind a thread). Over
several processes: ``ranks`` (who takes part) -> ``parallel``, and ``crew`` where the engine starts them. Nothing here
knows about Triton.
"""
