"""What the network computes with: Triton's kernels or torch."""
