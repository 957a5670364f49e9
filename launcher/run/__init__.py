"""Run a plan on a job's host: commands, processes, containers, and the directory in which an artefact grows."""
