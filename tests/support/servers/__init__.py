"""Servers that tests ask: real deployments, and stand-ins of others' servers."""
