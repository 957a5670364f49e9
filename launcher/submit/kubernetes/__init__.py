"""Plans as objects of Kubernetes: plain mappings, which ``directory`` writes. No cluster is asked for any of it."""
