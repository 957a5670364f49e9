"""Kernels in C for an x86-64 CPU, compiled on the machine that runs them; torch alone where there is no compiler."""
