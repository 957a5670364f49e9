"""FasterTransformer's directory and its requests: config.ini, weights, tensors, and what clients and engine exchange.

Everything that writes, proves, serves or measures such a directory reads it through this package, the engine inside
Triton's stub included. It therefore needs the standard library only and imports no other package of the project.
"""
