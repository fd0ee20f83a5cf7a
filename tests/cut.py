"""Mini-batches of a batch, from a plan that a test writes down."""

from collections.abc import Sequence


def mini_batches(batch, plan: Sequence[Sequence[Sequence[int]]], ranks, *, multiple_of: int = 1):
    """Cut a batch. plan: of each mini-batch, the responses of each microbatch, as indices."""
    from vapo_megatron.parallel.minibatches import make_microbatches, make_mini_batches

    microbatches = [microbatch for mini_batch in plan for microbatch in mini_batch]
    batch = batch.select([i for microbatch in microbatches for i in microbatch])
    cut = make_microbatches(batch, map(len, microbatches), multiple_of=multiple_of)
    return make_mini_batches(cut, map(len, plan), ranks)
