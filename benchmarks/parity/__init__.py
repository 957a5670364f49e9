"""Parity's limits held against sound and damaged models."""
