"""LoRA adapters, merged into the weights of the model that they were trained for."""
