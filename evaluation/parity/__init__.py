"""Parity: a comparison of the served model with its source, which shows whether the trained weights are served."""
