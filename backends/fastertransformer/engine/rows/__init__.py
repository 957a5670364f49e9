"""The rows of requests while they are generated, and their answers."""
