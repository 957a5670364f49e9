"""A real Slurm cluster for tests, and runs on it."""
