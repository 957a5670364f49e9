"""What is served, and that it is what was written."""
