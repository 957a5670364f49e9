"""Starting, proving and supervising the inference server."""
