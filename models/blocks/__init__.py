"""The parts that decoders are made of. A block's file has all that is known of it and of no other.

What it is (a dataclass of its sizes and kinds), which tensors it has by role (``query.weight``), what transformers
calls them unless an architecture says otherwise, and the keys of ``config.json`` that say it, read and written.
"""
