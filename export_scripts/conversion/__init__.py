"""The conversion itself, which knows no family: match, assemble, cast, write, resume and verify."""
