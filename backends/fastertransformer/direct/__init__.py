"""A second way to the engine, beside Triton's: the OpenAI endpoint of the same host asks it over a Unix socket.

A request takes half of what Triton and gRPC take of both processes before its first token, and a token a tenth of it.
"""
