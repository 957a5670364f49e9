"""The client of a served model: request and answer tensors, streaming, tokenizers, and the model behind an endpoint."""
