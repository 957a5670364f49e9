"""Results of runs, read and shown: the report, comparisons, the gate and recommendations."""
