"""Read what runs left and show it: the report, comparisons, the gate and recommendations."""
