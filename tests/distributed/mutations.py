"""Known mistakes, put into the package one at a time: each must turn the matrix red.

They are the ones that other trainers have shipped. Every patch replaces one function for the time
of one measurement, inside the worker processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
    """A mini-batch whose count of tokens is that of the microbatch at hand, times all of them.

    The schedule asks for one microbatch after the other, so the count follows.
    """

    def __init__(self, mini_batch, means):
        self._mini_batch, self._means = mini_batch, means
        self._tokens = iter([m.batch.loss_mask.sum() for m in mini_batch.microbatches])

    def __getattr__(self, name):
        return getattr(self._mini_batch, name)

    @property
    def counts(self):
        return {**self._mini_batch.counts, "tokens": next(self._tokens) * self._means}


def _local_counts() -> Patches:
    """Counts are not summed over the data-parallel ranks."""
    from vapo_megatron.parallel import minibatches

    return [(minibatches, "sum_over_data_parallel", lambda value, groups: value)]


def _places_without_observations() -> Patches:
    """Response tokens are looked for one behind the other, right behind the prompt."""
    from vapo_megatron.parallel import minibatches

    honest = minibatches.make_microbatch

    def wrong(batch, **cut):
        starts = batch.per_token(batch.prompt_lengths - batch.cu_seqlens[:-1])
        contiguous = starts.int() + starts.new_ones(len(starts)).cumsum(0).int() - 1
        return honest(batch.replace(places=contiguous), **cut)

    return [(minibatches, "make_microbatch", wrong)]


def _one_turn() -> Patches:
    """GAE by turn takes each response for one."""
    from vapo_megatron.roles import advantages

    honest = advantages.turn_layout
    return [(advantages, "turn_layout", lambda starts, bounds: honest(None, bounds))]


def _verdicts_alone() -> Patches:
    """What was earned on the way is lost."""
    from vapo_megatron.roles import advantages

    honest = advantages.token_rewards

    def wrong(batch):
        return honest(batch.replace(token_rewards=None))

    return [(advantages, "token_rewards", wrong)]


def _whitened_alone() -> Patches:
    """Mean and deviation of the advantages are those of a rank's own."""
    from vapo_megatron.roles import advantages

    return [(advantages, "sum_over_data_parallel", lambda value, groups: value)]


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


def _labels_after_the_cut() -> Patches:
    """A chunk's last token predicts what follows on its own rank, not in its sequence."""
    from vapo_megatron.parallel import minibatches

    honest = minibatches.make_microbatch

    def wrong(batch, **cut):
        part = honest(batch, **cut)
        if part.context_parallel is None:
            return part
        after = part.tokens.roll(-1)[part.predicting]
        return dataclasses.replace(
            part, context_parallel=dataclasses.replace(part.context_parallel, targets=after)
        )

    return [(minibatches, "make_microbatch", wrong)]


def _counts_over_context_parallel() -> Patches:
    """Counts are summed over the other group of two, half of the ranks."""
    from vapo_megatron.parallel import minibatches, reduce

    return [(minibatches, "sum_over_data_parallel", reduce.sum_over_context_parallel)]


def _contiguous_positions() -> Patches:
    """Each token is rotated as if rank r held the r-th part of a sequence."""
    import torch

    from vapo_megatron.models import rope
    from vapo_megatron.parallel import groups

    honest = rope.Rotary.__call__

    def wrong(self, query, key, cu_seqlens, rows=None):
        here = groups.current()
        own, starts = torch.arange(len(rows)), cu_seqlens.long() // here.cp_size
        sequence = torch.searchsorted(starts[1:], own, right=True)
        shift = starts[sequence] * (here.cp_size - 1) + starts.diff()[sequence] * here.cp_rank
        return honest(self, query, key, cu_seqlens, own + shift)

    return [(rope.Rotary, "__call__", wrong)]


def _gradients_of_half_of_the_ranks() -> Patches:
    """DDP reduces over the data-parallel ranks, without the context-parallel ones."""
    from megatron.core import parallel_state

    honest = parallel_state.get_data_parallel_group
    return [(parallel_state, "get_data_parallel_group", lambda *_, **__: honest())]


def _keys_of_own_queries() -> Patches:
    """Keys and values get the gradient of their own rank's queries alone."""
    from vapo_megatron.models import context_attention

    def wrong(whole, group):
        return whole.chunk(group.size())[group.rank()]

    return [(context_attention, "reduce_scatter", wrong)]


def _loss_counted_by_each_rank() -> Patches:
    """The gather's backward sums what all ranks send: each computes the same loss."""
    from vapo_megatron.parallel import context

    def wrong(ctx, grad):
        return context.reduce_scatter(grad, ctx.group), None

    return [(context._Gather, "backward", staticmethod(wrong))]


def _values_in_the_ranks_order() -> Patches:
    """What is gathered is not put back into the order of the sequences."""
    from vapo_megatron.roles import critic

    honest = critic.gather_tokens

    def wrong(own, microbatch, ranks):
        places = microbatch.context_parallel and dataclasses.replace(
            microbatch.context_parallel, outputs=microbatch.context_parallel.outputs.sort().values
        )
        return honest(own, dataclasses.replace(microbatch, context_parallel=places), ranks)

    return [(critic, "gather_tokens", wrong)]


def _experts_of_dense_ranks() -> Patches:
    """Experts' gradients are summed over the ranks that hold the same dense layers."""
    from vapo_megatron.models import build

    return [(build, "mark_experts", lambda chunk: None)]


def _weights_of_the_chosen() -> Patches:
    """Experts' weights add up to 1 although config.json says that they do not."""
    from vapo_megatron.models import build

    honest = build.experts_config

    def wrong(*arguments, **keywords):
        return {**honest(*arguments, **keywords), "moe_router_pre_softmax": False}

    return [(build, "experts_config", wrong)]


OF_EXPERTS = {
    "experts of dense ranks": _experts_of_dense_ranks,
    "weights of the chosen": _weights_of_the_chosen,
}
"""In test_experts.py."""


def _unmarked_adapters() -> Patches:
    """Sequence-parallel ranks do not sum the gradient of what they hold alike."""
    from vapo_megatron.models import adapters

    honest = adapters.Adapter.__init__

    def wrong(self, *given, **named):
        honest(self, *given, **named)
        for parameter in self.parameters():
            parameter.sequence_parallel = False

    return [(adapters.Adapter, "__init__", wrong)]


def _adapters_inputs_of_one_rank() -> Patches:
    """The gradient of A x comes from this rank's rows of B alone."""
    from vapo_megatron.models import adapters

    return [(adapters, "copy_to_tensor_model_parallel_region", lambda x: x)]


def _nothing_before_adapters_learns() -> Patches:
    """The embedding's output needs no gradient, so recomputed layers have none."""
    from vapo_megatron.weights import adapters

    return [(adapters, "prepare_frozen", lambda chunk: None)]


OF_ADAPTERS = {
    "unmarked adapters": _unmarked_adapters,
    "adapters' inputs of one rank": _adapters_inputs_of_one_rank,
    "nothing before adapters learns": _nothing_before_adapters_learns,
}
"""In test_adapters.py."""

MUTATIONS = {
    "NLL over the microbatch's own count": _own_count_of_positives,
    "mean of microbatch means": _mean_of_means,
    "counts of one data-parallel rank": _local_counts,
    "places without observations": _places_without_observations,
    "one turn of each response": _one_turn,
    "rewards of the last token alone": _verdicts_alone,
    "whitened on one data-parallel rank": _whitened_alone,
    "V shifted by one token": _value_of_the_next_state,
    "values scaled by the temperature": _value_over_temperature,
    "unmarked sequence-parallel head": _unmarked_head,
    "labels shifted after the split": _labels_after_the_cut,
    "counts over context-parallel ranks": _counts_over_context_parallel,
    "rotary positions of a contiguous cut": _contiguous_positions,
    "gradients summed over half of the ranks": _gradients_of_half_of_the_ranks,
    "keys without other ranks' queries": _keys_of_own_queries,
    "the same loss counted by each rank": _loss_counted_by_each_rank,
    "values in the ranks' order": _values_in_the_ranks_order,
}


@contextlib.contextmanager
def applied(name: str) -> Iterator[None]:
    """Make one mistake; the empty name makes none."""
    with contextlib.ExitStack() as stack:
        mistakes = MUTATIONS | OF_EXPERTS | OF_ADAPTERS
        for owner, attribute, wrong in mistakes[name]() if name else []:
            stack.enter_context(patch.object(owner, attribute, wrong))
        yield
