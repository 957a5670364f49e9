"""The OpenAI API in front of a running Triton server: ``python -m deployment.openai --help``."""
