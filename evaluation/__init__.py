"""Clients of a deployment: accuracy, latency and throughput, completions, and the report over all of it.

Nothing here but parity imports torch or the engine: everything is measured as any client would see it.
"""
