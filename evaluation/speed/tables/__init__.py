"""What was measured: records of requests, figures with their formulas, and the tables of points."""
