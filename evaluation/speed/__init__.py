"""Measure a served model: requests and their arrivals, the clocks, the figures, and the tables that hold them."""
