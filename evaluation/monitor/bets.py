"""The sequential test: bets against the deployment, whose wealth is evidence that holds whenever it is looked at.

Of each request there is the mean squared difference X between the log probabilities that the deployment gave its own
answer and the reference's, and the same, R, of the reference in the served number formats. A deployment is sound if its
differences are those of rounding, up to a factor: X is distributed as s times X', with s at most ``most_ratio`` and X'
and R exchangeable, whatever came before. Then log(X / (most_ratio R)) is symmetric about a value that is at most 0, so

    U = (X - most_ratio R) / (X + most_ratio R) = tanh(log(X / (most_ratio R)) / 2)

has an expectation of at most 0, however X and R are distributed. A bet multiplies its stake by 1 + a U, for an a below
1: a supermartingale of a sound deployment, which by Ville's inequality ever exceeds 1 / p with a probability of at most
p (Ville 1939; Waudby-Smith and Ramdas, Estimating means of bounded random variables by betting, JRSS B 86, 2024).

A defect may come late, after a sound time that has used up every stake. So the wealth of 1 is staked little by little,
1 / (k (k + 1)) of it before request k, and what is not staked yet is kept. That is still a supermartingale which begins
at 1, and behind n sound requests a defect needs n (n + 1) times the evidence, some requests more (mixtures over the
time of the change: Shin, Ramdas and Rinaldo, E-detectors, NEJSDS 2, 2024).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

SHARES = (0.05, 0.1, 0.2, 0.4, 0.8)
"""What of a stake is bet; the wealth is the mean of all, so that neither small nor large defects need a guess."""
_MOST = 1e200  # that evidence is counted to


@dataclass(frozen=True)
class Bets:
    """The test after some requests.

    Attributes:
        staked: wealth of what was staked, for each of ``SHARES``.
        most: largest evidence so far; by it the alarm is raised.
    """

    count: int = 0
    staked: tuple[float, ...] = field(default=(0.0,) * len(SHARES))
    most: float = 1.0

    @property
    def evidence(self) -> float:
        """The wealth, which began with 1."""
        return sum(self.staked) / len(self.staked) + 1 / (self.count + 1)

    def after(self, score: float) -> Bets:
        """Return the test after one more request.

        Args:
            score: U of the module.
        """
        number = self.count + 1
        stake = 1 / (number * (number + 1))
        staked = (
            min(_MOST, (held + stake) * (1 + share * score)) for held, share in zip(self.staked, SHARES, strict=True)
        )
        found = Bets(number, tuple(staked), self.most)
        return replace(found, most=max(self.most, found.evidence))


def score_of(square: float, of_formats: float, most_ratio: float, floor: float) -> float:
    """Return U of a request.

    Args:
        square: X.
        of_formats: R.
        most_ratio: see the module.
        floor: squared difference that fp32 in another order makes, added to R.
    """
    allowed = most_ratio * (of_formats + floor)
    return (square - allowed) / (square + allowed)
