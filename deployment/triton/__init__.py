"""A tritonserver: found, started, asked, watched."""
