"""Measurements of a served model: requests and their arrival times, clocks, figures, and the CSV tables."""
