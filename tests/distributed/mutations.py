"""Known mistakes, put into the package one at a time: each must turn the matrix red.

They are the ones that other trainers have shipped. Every patch replaces one function for the time
of one measurement, inside the worker processes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest.mock import patch

from tests.distributed.problem import TEMPERATURE

Patches = list[tuple[object, str, Callable]]


def _own_count_of_positives() -> Patches:
    """The NLL is divided by the microbatch's own correct tokens."""
    from vapo_megatron.algorithm import actor_loss

    honest = actor_loss.positive_lm_loss

    def wrong(logprobs, loss_mask, is_correct, *, num_positive_tokens, weights=None):
        own = (loss_mask & is_correct).sum()
        return honest(logprobs, loss_mask, is_correct, num_positive_tokens=own, weights=weights)

    return [(actor_loss, "positive_lm_loss", wrong)]


def _mean_of_means() -> Patches:
    """Each microbatch takes its own mean; the means are averaged over microbatches and ranks."""
    from vapo_megatron.parallel import minibatches

    honest = minibatches.make_mini_batches

    def wrong(microbatches, counts, ranks):
        (mini_batch,) = honest(microbatches, counts, ranks)
        means = len(mini_batch.microbatches) * ranks.dp_size
        return [_OwnCounts(mini_batch, means)]

    return [(minibatches, "make_mini_batches", wrong)]


class _OwnCounts:
    """A mini-batch whose num_tokens is that of the microbatch at hand, times all of them.

    The schedule asks for one microbatch after the other, so the count follows.
    """

    def __init__(self, mini_batch, means):
        self._mini_batch, self._means = mini_batch, means
        self._tokens = iter([m.batch.loss_mask.sum() for m in mini_batch.microbatches])

    def __getattr__(self, name):
        return getattr(self._mini_batch, name)

    @property
    def num_tokens(self):
        return next(self._tokens) * self._means


def _local_counts() -> Patches:
    """Counts are not summed over the data-parallel ranks."""
    from vapo_megatron.parallel import minibatches

    return [(minibatches, "sum_over_data_parallel", lambda value, groups: value)]


def _value_of_the_next_state() -> Patches:
    """V is read at the response token and not at the position before it."""
    from vapo_megatron.roles import critic

    def wrong(self, output, microbatch):
        return critic.values_of(output)[microbatch.predicting + 1]

    return [(critic.Critic, "_values", wrong)]


def _value_over_temperature() -> Patches:
    """Values are divided by the temperature, like logits."""
    from vapo_megatron.roles import critic

    honest = critic.values_of
    return [(critic, "values_of", lambda output: honest(output) / TEMPERATURE)]


def _unmarked_head() -> Patches:
    """Under sequence parallelism the head's partial gradients are not summed."""
    from vapo_megatron.models import value_head

    honest = value_head.ValueHead.__init__

    def wrong(self, *arguments, **keywords):
        honest(self, *arguments, **keywords)
        self.weight.sequence_parallel = False

    return [(value_head.ValueHead, "__init__", wrong)]


MUTATIONS = {
    "NLL over the microbatch's own count": _own_count_of_positives,
    "mean of microbatch means": _mean_of_means,
    "counts of one data-parallel rank": _local_counts,
    "V shifted by one token": _value_of_the_next_state,
    "values scaled by the temperature": _value_over_temperature,
    "unmarked sequence-parallel head": _unmarked_head,
}


@contextlib.contextmanager
def applied(name: str) -> Iterator[None]:
    """Make one mistake; the empty name makes none."""
    with contextlib.ExitStack() as stack:
        for owner, attribute, wrong in MUTATIONS[name]() if name else []:
            stack.enter_context(patch.object(owner, attribute, wrong))
        yield
