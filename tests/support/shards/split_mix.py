"""SplitMix64, the noise of sampling, in numpy."""

from __future__ import annotations


def split_mix(seed: int, count: int) -> list[float]:
    """SplitMix64 as its authors wrote it, in Python's own integers, from a state that is mixed once."""

    def mix(bits: int) -> int:
        bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) % 2**64
        return bits ^ (bits >> 31)

    state, numbers = mix(seed), []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        numbers.append((mix(state) >> 11) / 2**53)
    return numbers
