"""Hugging Face's directories, and the hub."""
