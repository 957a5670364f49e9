"""Each stage is a pure function from configuration and paths to a plan: no input or output, no cluster types."""
