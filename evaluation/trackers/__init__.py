"""A run's figures for MLflow and for Weights & Biases, each an optional extra."""
