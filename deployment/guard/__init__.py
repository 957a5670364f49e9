"""The guard in front of Triton's doors: what could end the server is refused before Triton reads it."""
