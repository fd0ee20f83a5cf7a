"""Fused log-probabilities on this machine's GPU, against float64; needs one (-m gpu).

Not exercised: tensor parallelism; time and memory at full size (section `logprobs` of
tools/gpu_smoke.py). tests/parallel/test_logprobs_gpu.py has what can be tested without a GPU.
"""

import pytest
import torch

from tests.parallel.test_logprobs_gpu import passes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU on this machine")
@pytest.mark.parametrize("with_entropy", [False, True])
def test_bfloat16_weights_give_float32_scores(with_entropy):
    sizes = {"rows": 300, "width": 5000, "size": 64, "scale": 2}
    found, exact = (
        passes(dtype, with_entropy, "cuda", **sizes) for dtype in (torch.bfloat16, torch.float64)
    )
    # Scores rounded to bfloat16 would err by up to 0.125.
    torch.testing.assert_close(found[0], exact[0], rtol=0, atol=1e-4)
    for gradient, expected in zip(found[1:], exact[1:], strict=True):
        # The chunk's gradient and the result are each rounded once, by at most 2^-9.
        assert (gradient - expected).norm() < 2**-8 * expected.norm()
