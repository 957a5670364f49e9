"""The operations of a network, with Triton's kernels or with torch; ops.py says what they are."""
