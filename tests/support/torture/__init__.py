"""What the campaigns of faults share: runs that are watched or killed, and counts."""
