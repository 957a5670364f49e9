"""Processes that are started, watched and stopped with a tritonserver."""
