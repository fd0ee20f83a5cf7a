"""Log-probabilities over 1, 2 and 4 tensor-parallel ranks: fused, unfused, and float64 on one.

The hidden states reach the vocabulary's shards as the actor's do, through gather_hidden of
models/build.py, with and without sequence parallelism. Vocabularies leave some ranks with padding
alone.

Not exercised: CUDA and NCCL; speed and memory (test_logprobs.py, test_benchmark.py).
"""

import itertools

import pytest
import torch
import torch.distributed as dist

from tests.parallel.operators import Operators
from vapo_megatron.parallel.logprobs import linear_logprobs, vocab_parallel_logprobs

T, H, PADDED = 8, 6, 16
VOCABULARIES = [16, 11, 3]
"""At 4 ranks of 4 rows: full; padding in rank 2 and nothing else on rank 3; rank 0 alone."""
TEMPERATURE = 0.7
NAMES = ["outputs", "hidden", "weight"]


def inputs(vocab_size, dtype):
    """Multiples of 1/8, so that every product is exact and its rounding to bfloat16 the same."""
    generator = torch.Generator().manual_seed(vocab_size)
    hidden = torch.randint(-12, 13, (T, H), generator=generator) / 8
    weight = torch.randint(-12, 13, (PADDED, H), generator=generator) / 8
    targets = torch.randint(vocab_size, (T,), generator=generator)
    targets[:2] = torch.tensor([0, vocab_size - 1])
    upstream = torch.randn(2, T, generator=generator)
    return hidden.to(dtype), weight.to(dtype), targets, upstream


def float64(vocab_size, dtype):
    """Outputs and gradients from the definition; the logits rounded as a linear layer's are."""
    hidden, weight, targets, upstream = inputs(vocab_size, dtype)
    hidden, weight = (x.double().requires_grad_() for x in (hidden, weight))
    logits = hidden @ weight.t()
    if dtype is torch.bfloat16:
        logits = logits + (logits.detach().bfloat16().double() - logits.detach())
    logp = torch.log_softmax(logits[:, :vocab_size] / TEMPERATURE, -1)
    picked = logp.gather(1, targets[:, None])[:, 0]
    outputs = torch.stack([picked, -(logp.exp() * logp).sum(-1)])
    (outputs * upstream).sum().backward()
    return dict(zip(NAMES, (outputs.detach(), hidden.grad, weight.grad), strict=True))


def on_rank(vocab_size, dtype, sequence_parallel, fused, place):
    """This rank's outputs, hidden states' gradient and weight's gradient."""
    from vapo_megatron.models.build import gather_hidden

    hidden, weight, targets, upstream = inputs(vocab_size, dtype)
    rank, size = place.tp_rank, place.tp_size
    shard = weight.chunk(size)[rank].clone().requires_grad_()
    mine = hidden.chunk(size)[rank] if sequence_parallel else hidden
    mine = mine.clone().requires_grad_()
    gathered = gather_hidden(mine[None], sequence_parallel=sequence_parallel)
    arguments = dict(vocab_size=vocab_size, temperature=TEMPERATURE, with_entropy=True)
    with Operators() as forward:
        if fused:
            both = linear_logprobs(
                gathered, shard, targets, place.tp_group, **arguments, chunk_size=3
            )
        else:
            logits = gathered @ shard.t()
            both = vocab_parallel_logprobs(logits, targets, place.tp_group, **arguments)
    outputs = torch.stack(both)
    gradient = torch.autograd.grad(outputs, gathered, upstream, retain_graph=True)[0]
    with Operators() as backward:
        torch.autograd.grad(outputs, gathered, upstream, retain_graph=True)
    (outputs * upstream).sum().backward()
    return {
        "outputs": outputs.detach(),
        "hidden": mine.grad,
        "weight": shard.grad,
        "partial": gradient,
        "collectives": [len(seen.collectives) for seen in (forward, backward)],
    }


def every_case(tp_size):
    """Results of every case on this rank."""
    from vapo_megatron.config import ParallelConfig
    from vapo_megatron.parallel import groups

    place = groups.initialize(
        ParallelConfig(world_size=tp_size, tensor_model_parallel_size=tp_size)
    )
    return {case: on_rank(*case, place) for case in cases(tp_size)}


def cases(tp_size):
    """(vocab_size, dtype, sequence_parallel, fused)."""
    dtypes = [torch.float32, torch.bfloat16]
    return list(
        itertools.product(VOCABULARIES, dtypes, [False, True][: min(tp_size, 2)], [False, True])
    )


def assert_near(found, expected, tolerance, label):
    error = (found.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-3)
    assert error <= tolerance, f"{label}: {float(error):.1e} of the largest"


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_fused_and_unfused_equal_one_process(workers, tp_size):
    ranks = workers.run(tp_size, every_case, tp_size)
    for case in cases(tp_size):
        vocab_size, dtype, sequence_parallel, fused = case
        results = [rank[case] for rank in ranks]
        expected = float64(vocab_size, dtype)
        # Of each rank's gradients of the logits and of their products, the bfloat16 ones are
        # rounded (2^-9 each), and the ranks' sum is once more.
        tolerance = 1e-5 if dtype is torch.float32 else 2**-7
        for result in results:
            assert torch.equal(result["outputs"], results[0]["outputs"]), case
            assert result["hidden"].dtype == result["weight"].dtype == dtype
            # One all-gather forward, and no communication backward.
            assert result["collectives"] == [int(tp_size > 1), 0], case
            if not sequence_parallel:
                assert torch.equal(result["hidden"], results[0]["hidden"]), case
        assert_near(results[0]["outputs"], expected["outputs"], 1e-5, case)
        hidden = results[0]["hidden"]
        if sequence_parallel:
            hidden = torch.cat([result["hidden"] for result in results])
        assert_near(hidden, expected["hidden"], tolerance, case)
        weight = torch.cat([result["weight"] for result in results])
        assert_near(weight, expected["weight"], tolerance, case)
        assert not weight[vocab_size:].any(), case
        partial = sum(result["partial"].double() for result in results)
        assert_near(partial, expected["hidden"], tolerance, case)
        if fused and dtype is torch.float32:
            for rank, name in itertools.product(ranks, NAMES):
                assert_near(rank[case][name], rank[(*case[:3], False)][name].double(), 1e-5, case)


def no_tokens():
    rank, group = dist.get_rank(), dist.group.WORLD
    hidden, weight, targets, _ = inputs(3, torch.float32)
    shard = weight.chunk(2)[rank].clone().requires_grad_()
    logprobs, entropy = linear_logprobs(
        hidden[:0], shard, targets[:0], group, vocab_size=3, with_entropy=True
    )
    (logprobs.sum() + entropy.sum()).backward()
    return logprobs.numel(), shard.grad.abs().max().item()


def test_no_tokens_on_two_ranks(workers):
    assert workers.run(2, no_tokens) == [(0, 0.0), (0, 0.0)]
