"""One network over several processes."""
