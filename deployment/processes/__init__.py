"""Processes of a deployment: found, started, watched, ended."""
