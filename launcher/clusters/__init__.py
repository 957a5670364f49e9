"""What differs from one kind of cluster to another before anything is submitted; ``submit`` has their executors."""
