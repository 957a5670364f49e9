"""The Triton model repository: each model's config.pbtxt, tensors and files."""
