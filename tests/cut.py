"""Batches, parts of them, and mini-batches from a plan that a test writes down."""

from collections.abc import Sequence


def batch_of(tokens, sequences, responses, **columns):
    """Sequences of these lengths, whose ends are responses of these lengths.

    tokens: int64 [S]; columns: in place of wrong responses that are worth 0, sampled at log-
    probabilities of 0.
    """
    import torch

    from vapo_megatron.data.batch import RolloutBatch, bounds

    sequences, responses = (torch.as_tensor(lengths) for lengths in (sequences, responses))
    count, size = len(responses), int(responses.sum())
    columns = {
        "positions": torch.arange(count), "rewards": torch.zeros(count),
        "is_correct": torch.zeros(count).bool(), "truncated": torch.zeros(count).bool(),
        "rollout_logprobs": torch.zeros(size), "loss_mask": torch.ones(size).bool(), **columns,
    }  # fmt: skip
    return RolloutBatch(tokens, bounds(sequences), bounds(responses), **columns)


def alone(prompt, response):
    """A microbatch of one response, of token ids."""
    import torch

    from vapo_megatron.data.microbatch import make_microbatch

    tokens = torch.tensor([*prompt, *response])
    return make_microbatch(batch_of(tokens, [len(tokens)], [len(response)]))


def select(batch, responses: Sequence[int]):
    """Return the batch of these responses, 0..B-1, in this order."""
    import torch

    parts = [batch.narrow(i, 1) for i in responses]
    fields = {}
    for name, whole in batch.tensors.items():
        if name.endswith("cu_seqlens"):
            lengths = whole.diff()[list(responses)].int()
            fields[name] = torch.cat([whole[:1], lengths.cumsum(0, dtype=torch.int32)])
        elif whole is not None:
            fields[name] = torch.cat([whole[:0], *(getattr(part, name) for part in parts)])
    return batch.replace(**fields)


def mini_batches(batch, plan: Sequence[Sequence[Sequence[int]]], ranks, *, multiple_of: int = 1):
    """Cut a batch. plan: of each mini-batch, the responses of each microbatch, as indices."""
    from vapo_megatron.parallel.minibatches import make_microbatches, make_mini_batches

    microbatches = [microbatch for mini_batch in plan for microbatch in mini_batch]
    batch = select(batch, [i for microbatch in microbatches for i in microbatch])
    if batch.is_positive is None:
        batch = batch.replace(is_positive=batch.per_token(batch.is_correct))
    cut = make_microbatches(batch, map(len, microbatches), multiple_of=multiple_of)
    return make_mini_batches(cut, map(len, plan), ranks)
