"""Ask a served model: tensors of requests and answers, streams, tokenizers, and what stands behind an endpoint."""
