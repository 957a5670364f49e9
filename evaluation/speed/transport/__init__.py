"""How a load's requests reach the server and its answers are timed: Triton's gRPC, and OpenAI's API."""
