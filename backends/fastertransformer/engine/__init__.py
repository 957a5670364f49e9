"""Inference over FasterTransformer's shards: torch, numpy and the standard library only.

Read in this order: ``config`` (what the model is) -> ``layouts`` (which shards it has) -> ``weights`` (shards to
tensors) -> ``network`` with ``attention`` over ``cache`` (keys and values) -> ``sampling`` (logits to a token) ->
``words`` (what must not come, what ends a row) -> ``request`` (what a client asked for) -> ``steps`` and ``generate``
(the loop) -> ``engine`` (all of it behind two functions). Over several processes: ``ranks`` (who takes part) ->
``parallel``. Nothing here knows about Triton.
"""
