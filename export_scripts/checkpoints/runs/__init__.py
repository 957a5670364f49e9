"""What trainings leave: a directory of steps, and where the model lies within one."""
