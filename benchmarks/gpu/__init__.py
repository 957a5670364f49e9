"""On a GPU: speed of the engine beside transformers and the hardware's floor, and that it computes what it should."""
