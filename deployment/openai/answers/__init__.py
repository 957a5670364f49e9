"""The paths of the API, and how their answers are written."""
