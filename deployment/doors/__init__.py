"""Where a deployment listens, and what is open there."""
