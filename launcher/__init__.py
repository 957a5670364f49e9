"""Login node and job host: configuration, plans, the runner and the executors."""
