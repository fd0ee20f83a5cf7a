"""Fused log-probabilities on this machine's GPU, against float64; needs one (-m gpu).

Not exercised: tensor parallelism; time and memory at full size (section `logprobs` of
tools/gpu_smoke.py). tests/parallel/test_logprobs_gpu.py has what can be tested without a GPU.
"""

import pytest
import torch

from vapo_megatron.parallel.logprobs import linear_logprobs

ROWS, WIDTH, HIDDEN = 300, 5000, 64


def passes(dtype, with_entropy):
    """Outputs and gradients in float64, of logits up to 60, in chunks of 64 rows."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator).bfloat16()
    weight = (2 * torch.randn(WIDTH, HIDDEN, generator=generator)).bfloat16()
    targets = torch.randint(WIDTH - 7, (ROWS,), generator=generator).cuda()
    upstream = torch.randn(2, ROWS, generator=generator).cuda()
    leaves = [x.to("cuda", dtype).requires_grad_() for x in (hidden, weight)]
    outputs = linear_logprobs(
        *leaves, targets, None,
        vocab_size=WIDTH - 7, temperature=0.7, with_entropy=with_entropy, chunk_size=64,
    )  # fmt: skip
    outputs = [x for x in outputs if x is not None]
    sum((u * x).sum() for u, x in zip(upstream, outputs)).backward()
    return [x.double() for x in (torch.stack(outputs).detach(), *(x.grad for x in leaves))]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU on this machine")
@pytest.mark.parametrize("with_entropy", [False, True])
def test_bfloat16_weights_give_float32_scores(with_entropy):
    found, exact = (passes(dtype, with_entropy) for dtype in (torch.bfloat16, torch.float64))
    # Scores rounded to bfloat16 would err by up to 0.125.
    torch.testing.assert_close(found[0], exact[0], rtol=0, atol=1e-4)
    for gradient, expected in zip(found[1:], exact[1:], strict=True):
        # The chunk's gradient and the result are each rounded once, by at most 2^-9.
        assert (gradient - expected).norm() < 2**-8 * expected.norm()
