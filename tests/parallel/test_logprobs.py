"""Vocabulary-parallel log-probabilities and entropy, against float64, on one process and on two.

Not exercised: CUDA and NCCL; more than two tensor-parallel ranks; speed. Memory is bounded through
the largest tensor that any operator returns, not through the allocator.
"""

import math

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from vapo_megatron.parallel.logprobs import linear_logprobs, vocab_parallel_logprobs

T, H, V, PADDED = 7, 5, 11, 16


def _inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(T, H, generator=generator, dtype=torch.float64)
    weight = torch.randn(PADDED, H, generator=generator, dtype=torch.float64)
    targets = torch.randint(V, (T,), generator=generator)
    targets[:2] = torch.tensor([0, V - 1])
    upstream = torch.randn(2, T, generator=generator, dtype=torch.float64)
    return hidden.to(dtype), weight.to(dtype), targets, upstream.to(dtype)


def _reference(logits, targets, temperature):
    """Straight from the definition; logits [T, >= V]."""
    logp = torch.log_softmax(logits[:, :V] / temperature, -1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def _reference_gradients(temperature):
    """float64 logprobs, entropy, and the gradients of hidden, weight and logits."""
    hidden, weight, targets, upstream = _inputs()
    hidden.requires_grad_(), weight.requires_grad_()
    logits = hidden @ weight.t()
    logits.retain_grad()
    outputs = torch.stack(_reference(logits, targets, temperature))
    (outputs * upstream).sum().backward()
    return outputs.detach(), hidden.grad, weight.grad, logits.grad


def test_golden_numbers():
    # softmax(ln 1, ln 2, ln 4) = (1, 2, 4)/7; at temperature 1/2 the logits double: (1, 4, 16)/21.
    logits = torch.tensor([[0.0, math.log(2), math.log(4), 50.0]])
    targets = torch.tensor([1])
    logprobs, entropy = vocab_parallel_logprobs(
        logits, targets, None, vocab_size=3, with_entropy=True
    )
    assert logprobs.item() == pytest.approx(math.log(2 / 7), abs=1e-6)
    expected = -(math.log(1 / 7) + 2 * math.log(2 / 7) + 4 * math.log(4 / 7)) / 7
    assert entropy.item() == pytest.approx(expected, abs=1e-6)
    logprobs, entropy = vocab_parallel_logprobs(
        logits, targets, None, vocab_size=3, temperature=0.5
    )
    assert logprobs.item() == pytest.approx(math.log(4 / 21), abs=1e-6)
    assert entropy is None


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_size", [1, 3, T, None])
@pytest.mark.parametrize("linear", [True, False])
def test_values_and_gradients_equal_float64(linear, chunk_size, temperature):
    expected, *gradients = _reference_gradients(temperature)
    hidden, weight, targets, upstream = _inputs(torch.float32)
    logits = hidden @ weight.t()
    keywords = dict(vocab_size=V, temperature=temperature, with_entropy=True, chunk_size=chunk_size)
    leaves = [hidden, weight] if linear else [logits]
    before = [leaf.clone() for leaf in leaves]
    for leaf in leaves:
        leaf.requires_grad_()
    if linear:
        outputs = linear_logprobs(hidden, weight, targets, None, **keywords)
    else:
        outputs = vocab_parallel_logprobs(logits, targets, None, **keywords)
    (torch.stack(outputs) * upstream).sum().backward()
    torch.testing.assert_close(torch.stack(outputs).double(), expected, rtol=1e-5, atol=1e-5)
    for leaf, unchanged, gradient in zip(
        leaves, before, gradients if linear else gradients[2:], strict=False
    ):
        assert torch.equal(leaf.detach(), unchanged)
        torch.testing.assert_close(leaf.grad.double(), gradient, rtol=1e-5, atol=1e-5)


def test_each_output_alone_is_differentiable():
    hidden, weight, targets, _ = _inputs()
    hidden.requires_grad_(), weight.requires_grad_()

    def outputs(h, w):
        return linear_logprobs(
            h, w, targets, None, vocab_size=V, temperature=1.3, with_entropy=True, chunk_size=2
        )

    for index in (0, 1):
        assert torch.autograd.gradcheck(lambda h, w, i=index: outputs(h, w)[i], (hidden, weight))


def test_padding_has_no_probability_and_no_gradient():
    hidden, weight, targets, upstream = _inputs(torch.float32)
    logits = hidden @ weight.t()
    poisoned = logits.clone()
    poisoned[:, V] = 1e4
    poisoned[:, V + 1 :] = float("nan")
    keywords = dict(vocab_size=V, with_entropy=True)
    clean = vocab_parallel_logprobs(logits, targets, None, **keywords)
    poisoned.requires_grad_()
    outputs = vocab_parallel_logprobs(poisoned, targets, None, **keywords)
    assert torch.equal(torch.stack(outputs), torch.stack(clean))
    (torch.stack(outputs) * upstream).sum().backward()
    assert torch.equal(poisoned.grad[:, V:], torch.zeros(T, PADDED - V))
    weight.requires_grad_()
    linear_logprobs(hidden, weight, targets, None, **keywords)[0].sum().backward()
    assert torch.equal(weight.grad[V:], torch.zeros(PADDED - V, H))


def test_large_logits_keep_their_digits():
    hidden, weight, targets, _ = _inputs(torch.float32)
    # Multiples of 2^-6 stay exact in float32 after 2^14 is added (24 bits), so nothing may change.
    logits = ((hidden @ weight.t()) * 64).round() / 64
    keywords = dict(vocab_size=V, with_entropy=True)
    plain = vocab_parallel_logprobs(logits, targets, None, **keywords)
    shifted = vocab_parallel_logprobs(logits + 2.0**14, targets, None, **keywords)
    torch.testing.assert_close(torch.stack(shifted), torch.stack(plain), rtol=0, atol=2e-6)


def test_bfloat16_logits_are_worked_on_in_float32():
    hidden, weight, targets, upstream = _inputs(torch.bfloat16)
    logits = (hidden @ weight.t()).requires_grad_()
    wide = logits.detach().float().requires_grad_()
    for leaf in (logits, wide):
        outputs = vocab_parallel_logprobs(
            leaf, targets, None, vocab_size=V, temperature=0.9, with_entropy=True
        )
        assert all(x.dtype == torch.float32 for x in outputs)
        (torch.stack(outputs) * upstream.float()).sum().backward()
    assert logits.grad.dtype == torch.bfloat16
    assert torch.equal(logits.grad, wide.grad.bfloat16())
    expected = _reference(logits.detach().double(), targets, 0.9)
    torch.testing.assert_close(
        torch.stack(outputs).double(), torch.stack(expected), rtol=1e-5, atol=1e-5
    )
    hidden.requires_grad_(), weight.requires_grad_()
    fused = linear_logprobs(
        hidden,
        weight,
        targets,
        None,
        vocab_size=V,
        temperature=0.9,
        with_entropy=True,
        chunk_size=3,
    )
    torch.testing.assert_close(torch.stack(fused), torch.stack(outputs), rtol=0, atol=1e-6)
    (torch.stack(fused) * upstream.float()).sum().backward()
    assert weight.grad.dtype == hidden.grad.dtype == torch.bfloat16
    torch.testing.assert_close(hidden.grad, logits.grad @ weight.detach(), rtol=2e-2, atol=2e-2)


def test_a_weight_gradient_over_many_chunks_is_accumulated_in_float32():
    # 512 tokens with the same gradient g: adding one at a time in bfloat16 would stop at 256 g.
    rows = 512
    hidden = torch.ones(rows, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    logprobs, _ = linear_logprobs(
        hidden, weight, torch.zeros(rows, dtype=torch.long), None, vocab_size=2, chunk_size=1
    )
    logprobs.sum().backward()
    assert weight.grad.flatten().tolist() == [rows / 2, -rows / 2]  # d log p / d w = 1 - 1/2, -1/2


def test_no_tokens():
    hidden, weight, _, _ = _inputs(torch.float32)
    hidden.requires_grad_(), weight.requires_grad_()
    targets = torch.zeros(0, dtype=torch.long)
    keywords = dict(vocab_size=V, with_entropy=True)
    for outputs in (
        linear_logprobs(hidden[:0], weight, targets, None, **keywords),
        vocab_parallel_logprobs(hidden[:0] @ weight.t(), targets, None, **keywords),
    ):
        assert [list(x.shape) for x in outputs] == [[0], [0]]
        weight.grad = hidden.grad = None
        sum(x.sum() for x in outputs).backward()
        assert torch.equal(weight.grad, torch.zeros_like(weight))
        assert torch.equal(hidden.grad, torch.zeros_like(hidden))


def test_leading_dimensions_are_kept():
    hidden, weight, targets, _ = _inputs(torch.float32)
    keywords = dict(vocab_size=V, with_entropy=True)
    flat = linear_logprobs(hidden[:6], weight, targets[:6], None, **keywords)
    for outputs in (
        linear_logprobs(hidden[:6].view(3, 2, H), weight, targets[:6].view(3, 2), None, **keywords),
        vocab_parallel_logprobs(
            (hidden[:6] @ weight.t()).view(3, 2, PADDED), targets[:6].view(3, 2), None, **keywords
        ),
    ):
        for output, expected in zip(outputs, flat, strict=True):
            assert output.shape == (3, 2)
            torch.testing.assert_close(output.flatten(), expected)


class _Operators(TorchDispatchMode):
    """Records the operators that run and the largest tensor that one of them returns."""

    def __init__(self):
        super().__init__()
        self.names, self.largest = [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.names.append(str(function))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.untyped_storage().nbytes())
        return result


def test_the_logits_never_exist_in_full():
    rows, width, chunk = 64, 400, 4
    hidden = torch.randn(rows, H, requires_grad=True)
    weight = torch.randn(width, H, requires_grad=True)
    targets = torch.randint(width, (rows,))
    with _Operators() as seen:
        outputs = linear_logprobs(
            hidden, weight, targets, None, vocab_size=width, with_entropy=True, chunk_size=chunk
        )
        sum(x.sum() for x in outputs).backward()
    # The weight's gradient [400, 5] is larger than a chunk's scores [4, 400]; logits are [64, 400].
    assert seen.largest == 4 * width * H
    with _Operators() as seen:
        vocab_parallel_logprobs(hidden @ weight.t(), targets, None, vocab_size=width)
    assert seen.largest == 4 * rows * width


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(targets=torch.full((T,), V)), "targets must lie in"),
        (dict(targets=torch.full((T,), -1)), "targets must lie in"),
        (dict(targets=torch.zeros(T - 1, dtype=torch.long)), "must have the shape"),
        (dict(vocab_size=PADDED + 1), "vocab_size=17 must lie in 1..16"),
        (dict(temperature=0.0), "must be > 0"),
        (dict(chunk_size=0), "must be > 0"),
        (dict(weight_shard=torch.zeros(PADDED, H + 1)), "last size"),
        (dict(weight_shard=torch.zeros(PADDED, H, dtype=torch.bfloat16)), "dtype"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, message):
    hidden, weight, targets, _ = _inputs(torch.float32)
    arguments = dict(hidden=hidden, weight_shard=weight, targets=targets, vocab_size=V) | change
    with pytest.raises(ValueError, match=message):
        linear_logprobs(**arguments, tp_group=None)


def _on_two_ranks(vocab_size: int):
    rank, group = dist.get_rank(), dist.group.WORLD
    hidden, weight, targets, upstream = _inputs(torch.float32)
    width = PADDED // 2
    targets = targets % vocab_size
    shard = weight[rank * width : (rank + 1) * width].clone().requires_grad_()
    hidden.requires_grad_()
    keywords = dict(vocab_size=vocab_size, temperature=0.7, with_entropy=True)
    with _Operators() as seen:
        outputs = torch.stack(
            linear_logprobs(hidden, shard, targets, group, **keywords, chunk_size=3)
        )
    collectives = [name for name in seen.names if name.startswith("c10d")]
    with _Operators() as seen:
        (outputs * upstream).sum().backward()
    collectives_backward = [name for name in seen.names if name.startswith("c10d")]
    logits = (hidden @ shard.t()).detach().requires_grad_()
    unfused = torch.stack(vocab_parallel_logprobs(logits, targets, group, **keywords))
    (unfused * upstream).sum().backward()
    empty, _ = linear_logprobs(hidden[:0], shard, targets[:0], group, vocab_size=vocab_size)
    assert empty.numel() == 0
    return (
        outputs.detach(), unfused.detach(), hidden.grad, shard.grad, logits.grad,
        collectives, collectives_backward,
    )  # fmt: skip


@pytest.mark.parametrize("vocab_size", [V, 6])  # at 6 all that rank 1 holds is padding
def test_two_ranks_equal_one(workers, vocab_size):
    hidden, weight, targets, upstream = _inputs(torch.float32)
    targets = targets % vocab_size
    hidden.requires_grad_(), weight.requires_grad_()
    logits = hidden @ weight.t()
    logits.retain_grad()
    one = torch.stack(
        vocab_parallel_logprobs(
            logits, targets, None, vocab_size=vocab_size, temperature=0.7, with_entropy=True
        )
    )
    (one * upstream).sum().backward()
    first, second = workers.run(2, _on_two_ranks, vocab_size)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    for outputs in (first[0], first[1]):
        torch.testing.assert_close(outputs, one.detach(), rtol=1e-5, atol=1e-6)
    # The gradient of the hidden states is each rank's share.
    torch.testing.assert_close(first[2] + second[2], hidden.grad, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(first[2], hidden.grad) or vocab_size == 6
    torch.testing.assert_close(torch.cat([first[3], second[3]]), weight.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        torch.cat([first[4], second[4]], -1), logits.grad, rtol=1e-5, atol=1e-6
    )
    assert len(first[5]) == 1 and not first[6], (first[5], first[6])
