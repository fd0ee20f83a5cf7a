"""Vocabulary-parallel log-probabilities and entropy, against float64, on one process.

Not exercised: CUDA; several ranks (test_logprobs_parallel.py); speed, and what an operator
allocates inside itself (tests/tools/test_benchmark_gae.py measures a whole process).
"""

import math

import pytest
import torch

from tests.parallel.operators import Operators
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


@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradients_of_large_logits_keep_their_digits(with_entropy):
    # Logits of +-100: the normaliser's rounding, 100 * 6e-8, would be in every probability.
    generator = torch.Generator().manual_seed(4)
    given = torch.randn(50, 400, generator=generator) * 30
    targets = torch.randint(400, (50,), generator=generator)
    upstream = torch.randn(2, 50, generator=generator)

    def gradient(logits):
        logits.requires_grad_()
        outputs = vocab_parallel_logprobs(
            logits, targets, None, vocab_size=400, with_entropy=with_entropy
        )
        sum((u * x).sum() for u, x in zip(upstream, outputs) if x is not None).backward()
        return logits.grad

    exact = gradient(given.double())
    error = (gradient(given.clone()).double() - exact).norm() / exact.norm()
    assert error < 3e-7


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


def _peak_bytes(dtype, with_entropy, chunk_size, rows=64, width=4096):
    """Most bytes alive at once in forward and backward, without inputs and the weight's gradient.

    In float32 [1, width] rows, so that a chunk of scores counts as its rows.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, H, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(width, H, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(width, (rows,), generator=generator)
    with Operators() as seen:
        outputs = linear_logprobs(
            hidden, weight, targets, None,
            vocab_size=width, with_entropy=with_entropy, chunk_size=chunk_size,
        )  # fmt: skip
        torch.stack([x for x in outputs if x is not None]).sum().backward()
    gradient = width * H * 4  # accumulated in float32
    return (seen.peak_bytes - gradient) / (width * 4)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("chunk_size,chunk_and_tile", [(2, 2), (4, 4), (16, 15), (32, 26)])
def test_no_more_than_one_chunk_of_scores_is_held(with_entropy, chunk_size, chunk_and_tile):
    # With entropy, chunk and tile share chunk_size: 32 is a tile of 32/8 = 4 and at most 28, and 64
    # rows in 3 equal chunks are 22 each: 26. 16 is 2 and 5 of 13; 4 is 1 and 22 of 3; 2 is 1 and 1.
    expected = chunk_and_tile if with_entropy else chunk_size
    # What else is alive counts by tokens: the hidden states' gradient (64 * 5 numbers) and some
    # numbers per token, together less than half a row of 4096. The logits would be 64 rows.
    held = _peak_bytes(torch.float32, with_entropy, chunk_size)
    assert expected <= held < expected + 0.5


@pytest.mark.parametrize("with_entropy", [False, True])
def test_a_bfloat16_chunk_and_its_float32_tiles_are_less_than_a_float32_chunk(with_entropy):
    # The parts of the weight's gradient before they are added up, and its rounded copy at the end
    # [4096, 5] in bfloat16, are 2.5 rows each; of 32 rows in bfloat16 and 4 (or 8) in float32, 20.
    held = _peak_bytes(torch.bfloat16, with_entropy, 32)
    assert 16 < held < (16 + 8 if with_entropy else 16 + 4) + 2.5 + 0.5


def test_logits_that_are_given_are_worked_on_in_tiles():
    rows, width = 64, 4096
    logits = torch.randn(rows, width)
    targets = torch.randint(width, (rows,))
    with Operators() as seen:
        vocab_parallel_logprobs(
            logits, targets, None, vocab_size=width, with_entropy=True, chunk_size=16
        )
    assert seen.peak_bytes < (2 + 2 + 0.5) * width * 4


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
