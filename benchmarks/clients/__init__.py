"""Load generators: the client's own limits, and other tools on the same endpoint."""
