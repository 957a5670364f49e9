"""What a run of the launcher is given."""
