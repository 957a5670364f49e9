"""The operations of a network, with Triton's kernels or with torch; base.py says what they are."""
