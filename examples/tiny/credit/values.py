"""Exact values of locks and keys: V of every state of a response, and each key's true advantage.

The policy opens a lock of kind k with probability p_k, and copies everything else right. With c
locks open before token t, and the locks n, n+1, ... still to be decided,

    V_t = 2 P(c + sum_{i >= n} Bernoulli(p_{k_i}) >= goal) - 1,    A_t = V_{t+1} - V_t

for rewards of +1 and -1: the tail of a Poisson binomial, of a binomial where all p_k are equal.
V_{T} after the last token is the reward. A lock is decided by its key, or lost by whatever else
stands where its label, its number or its key should be.

p_k is the policy's own: pi(good key) where the good key was sampled, 1 - pi(key) where another was,
averaged over all steps of a batch with a lock of this kind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from credit import keys
from credit.keys import Problem

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Path:
    """The states of a response of T tokens."""

    opened: Ints
    """[T+1]: locks open before token t; the last entry is after the last token."""
    decided: Ints
    """[T+1]: locks open or lost."""
    key_tokens: Ints
    """Tokens that are one of the two keys of the lock to be decided, after its label and lock."""
    is_good: NDArray[np.bool_]
    """Whether each of these is the good one."""
    filler_tokens: Ints
    """The filler tokens."""

    @property
    def key_locks(self) -> Ints:
        """Index of the lock that each key token decides."""
        return self.decided[self.key_tokens]


def follow(problem: Problem, tokens: Sequence[str]) -> Path:
    """Follow a response through its states.

    Args:
        problem: that it answers.
        tokens: text of each token of the response; whatever is no text, such as the stop token, is
            a token of its own.
    """
    opened, decided = [0], [0]
    key_tokens, is_good, filler = [], [], []
    step, at = 0, 0  # of the next token, and its place in the step
    for t, token in enumerate(tokens):
        count, done = opened[-1], decided[-1]
        pending = done == step < len(problem.kinds)
        if token == ",":
            done, step, at = max(done, min(step + 1, len(problem.kinds))), step + 1, 0
        else:
            if pending and at < 3:
                kind = problem.kinds[step]
                both = [keys.good_key(kind), keys.bad_key(kind)]
                right = ([f"{step + 1}:"], [keys.lock(kind)], both)[at]
                if at == 2 and token in both:
                    key_tokens.append(t)
                    is_good.append(token == both[0])
                    count += token == both[0]
                done += at == 2 or token not in right
            if token in keys.FILLER:
                filler.append(t)
            at += 1
        opened.append(count)
        decided.append(done)
    return Path(*map(np.array, (opened, decided)), *_arrays(key_tokens, is_good, filler))


def _arrays(key_tokens: list[int], is_good: list[bool], filler: list[int]) -> tuple:
    return np.array(key_tokens, int), np.array(is_good, bool), np.array(filler, int)


def tails(chances: Floats) -> Floats:
    """Return P(at least m of the events n, n+1, ... happen), for independent events.

        F_n(m) = p_n F_{n+1}(m - 1) + (1 - p_n) F_{n+1}(m),   F_N(m) = 1 if m <= 0 else 0

    Args:
        chances: [N, B] probabilities p_n of B sequences of events.

    Returns:
        [N+1, N+1, B], by n and m.
    """
    number, width = chances.shape
    found = np.zeros((number + 1, number + 1, width))
    found[:, 0] = 1
    for n in reversed(range(number)):
        p, after = chances[n], found[n + 1]
        found[n, 1:] = p * after[:-1] + (1 - p) * after[1:]
    return found


def values(
    problems: Sequence[Problem], paths: Sequence[Path], chances: Floats, rewards: Sequence[float]
) -> list[Floats]:
    """Return V of each response's states, [T+1] each; the last entry is the reward.

    Args:
        problems, paths: one per response.
        chances: [NUM_KINDS] p_k.
        rewards: of the responses.
    """
    width = max(len(problem.kinds) for problem in problems)
    of_locks = np.zeros((width, len(problems)))
    """Locks that a problem does not have are never opened."""
    for column, problem in enumerate(problems):
        of_locks[: len(problem.kinds), column] = chances[list(problem.kinds)]
    table = tails(of_locks)
    found = []
    for column, (problem, path, reward) in enumerate(zip(problems, paths, rewards, strict=True)):
        wanted = np.clip(problem.goal - path.opened, 0, width)
        of_states = 2 * table[path.decided, wanted, column] - 1
        of_states[-1] = reward
        found.append(of_states)
    return found


def chances_of(
    problems: Sequence[Problem], paths: Sequence[Path], logprobs: Sequence[Floats]
) -> Floats:
    """Return the policy's p_k [NUM_KINDS] from the log-probabilities of the responses' tokens.

    A kind that no response has a key for gets the mean of the others.
    """
    kinds = np.concatenate(
        [np.array(p.kinds)[path.key_locks] for p, path in zip(problems, paths, strict=True)]
    )
    taken = np.exp(
        np.concatenate([each[path.key_tokens] for each, path in zip(logprobs, paths, strict=True)])
    )
    is_good = np.concatenate([path.is_good for path in paths])
    good = np.where(is_good, taken, 1 - taken)
    counts = np.bincount(kinds, minlength=keys.NUM_KINDS)
    sums = np.bincount(kinds, good, minlength=keys.NUM_KINDS)
    mean = good.mean() if len(good) else 0.5
    return np.where(counts > 0, sums / np.maximum(counts, 1), mean)
