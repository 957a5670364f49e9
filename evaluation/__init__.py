"""Clients of a deployment: accuracy, latency and throughput, completions, and the report over all of it.

Nothing here imports torch, the engine or the launcher: what is measured is what any client would see.
"""
