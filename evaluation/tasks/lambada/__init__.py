"""LAMBADA: its file, the spans that its metrics look at, and its figures."""
