"""Seeded permutations and hashes that are the same on every machine, Python and NumPy version."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ADD = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLY_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = np.uint64(0x94D049BB133111EB)


def seeded_permutation(count: int, *keys: int) -> list[int]:
    """Return 0..count-1 in an order that depends only on count and keys.

    Sorts the numbers by their hashes with the keys (splitmix64, Steele et al. 2014), because the
    shuffles of NumPy and Python may change between versions.

    Args:
        count: length of the result.
        keys: such as a seed, a purpose and an epoch.
    """
    state = np.zeros(1, np.uint64)
    for key in keys:
        state = mix(state ^ np.uint64(key % 2**64))
    hashes = mix(state ^ mix(np.arange(count, dtype=np.uint64)))
    return np.argsort(hashes, kind="stable").tolist()


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the hashes of numbers, by splitmix64's generator; uint64, of x's shape."""
    x = x + _ADD
    x = (x ^ (x >> np.uint64(30))) * _MULTIPLY_1
    x = (x ^ (x >> np.uint64(27))) * _MULTIPLY_2
    return x ^ (x >> np.uint64(31))
