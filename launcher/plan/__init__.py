"""What will run, as data: result paths, checks before anything is written, and a plan for each stage."""
