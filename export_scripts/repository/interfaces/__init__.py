"""Each family's tensors behind Triton, and the model configurations made of them."""
