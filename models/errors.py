"""The error of this package."""

from __future__ import annotations


class ModelError(ValueError):
    """A configuration that describes no model known here.

    Attributes:
        problem: what is wrong and where.
        hint: what to do next; may be empty.
    """

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(f"{problem}\nhint: {hint}" if hint else problem)
        self.problem, self.hint = problem, hint
