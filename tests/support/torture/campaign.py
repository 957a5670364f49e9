"""How large a campaign is, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Tally:
    """What a campaign tried and how often the product held; printed at the end of the run.

    Attributes:
        name: of the campaign, as ``docs/reliability.md`` has it.
        tried: trials so far.
        failures: one line for each trial in which the product did not hold.
        remarks: what else is printed.
    """

    name: str
    tried: int = 0
    failures: list[str] = field(default_factory=list)
    remarks: str = ""

    def record(self, failure: str | None = None) -> None:
        """Count one trial; ``failure`` says what went wrong in it, None that the product held."""
        self.tried += 1
        if failure:
            self.failures.append(failure)

    def check(self) -> None:
        """Fail the test if any trial failed, or if nothing was tried."""
        assert self.tried, f"{self.name}: nothing was tried"
        assert not self.failures, f"{len(self.failures)} of {self.tried} failed:\n" + "\n".join(self.failures[:20])


@dataclass(frozen=True)
class Campaign:
    """How large this run's campaigns are.

    Attributes:
        size: "small" in the test suite; "hour": what about an hour takes; "full": everything, for hours.
    """

    size: str

    @property
    def is_full(self) -> bool:
        return self.size == "full"

    def trials(self, small: int, full: int) -> int:
        """Number of trials: ``small``, a sixth of ``full``, or ``full``."""
        return {"small": small, "hour": max(small, full // 6), "full": full}[self.size]
