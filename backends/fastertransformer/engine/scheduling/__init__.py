"""Which sequences are in a step, and which token each takes next."""
