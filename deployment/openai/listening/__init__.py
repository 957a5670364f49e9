"""The endpoint's process or processes: listening, connections, who may ask, and logs."""
