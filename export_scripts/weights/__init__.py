"""Tables: FasterTransformer's layout of a model family, and which source tensor becomes which target."""
