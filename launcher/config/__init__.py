"""The configuration: every key with its type, how Hydra composes it, and the words for what it refuses."""
