"""The network, and the steps that generation asks of it."""
