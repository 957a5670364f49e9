"""Texts and tokens: tokenizers, chat templates, and the processes that read requests with them."""
