"""A module a stage: ``check`` says what can be known before anything is written, ``plan`` says what will run."""
