"""A deployment: what Triton, the guard and the OpenAI endpoint add, and how it bears many clients."""
