"""Conversions: their time beside ``cp``, their memory, and the largest models."""
