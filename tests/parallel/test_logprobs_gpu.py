"""Log-probabilities as a GPU computes them: float32 scores and sums of bfloat16 matrices.

On meta tensors, which have shapes, dtypes and sizes alone, with torch's CUDA build also on fake
CUDA tensors; and on a CPU with tensors that pass for a GPU's, the two operators that it lacks
written in float32 (labels.py). Not exercised: cuBLAS and the kernels' time (section `logprobs` of
tools/gpu_smoke.py; tests/gpu).
"""

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.parallel.labelled_cuda import labelled_gpu
from tests.parallel.operators import Operators
from vapo_megatron.parallel import score_chunks
from vapo_megatron.parallel.logprobs import linear_logprobs
from vapo_megatron.parallel.score_chunks import default_chunk_size

ROWS, WIDTH = 64, 4096
ROW_BYTES = 4 * WIDTH
DEVICES = ["meta"] + ["cuda"] * (torch.version.cuda is not None)


@pytest.fixture(params=DEVICES)
def device(request):
    """Tensors without memory, of the device that is yielded."""
    with FakeTensorMode() if request.param == "cuda" else contextlib.nullcontext():
        yield request.param


def run(device, hidden_size, with_entropy=False, backward=True):
    """One pass in bfloat16, in chunks of at most 16 rows -> what was allocated, and gradients."""
    hidden, weight = (
        torch.empty(n, hidden_size, dtype=torch.bfloat16, device=device, requires_grad=backward)
        for n in (ROWS, WIDTH)
    )
    targets = torch.empty(ROWS, dtype=torch.long, device=device)
    with Operators() as seen:
        outputs = linear_logprobs(
            hidden, weight, targets, None,
            vocab_size=WIDTH, temperature=0.7, with_entropy=with_entropy, chunk_size=16,
        )  # fmt: skip
        outputs = [x for x in outputs if x is not None]
        assert {(x.dtype, x.shape) for x in outputs} == {(torch.float32, (ROWS,))}
        # Called directly, because autograd's engine asks for a GPU.
        given = [torch.empty(ROWS, device=device) for _ in outputs] + [None]
        node = outputs[0].grad_fn.next_functions[0][0] if backward else None
        gradients = node.apply(*given[:2])[:2] if node else ()
    return seen, gradients


def test_the_weight_is_neither_copied_nor_its_gradient_passed_over(device):
    seen, gradients = run(device, 5)
    # 64 rows in chunks of 16: four products forward, four again in the backward pass, and of each
    # chunk's gradient with weight and hidden states one.
    assert seen.names.count("aten.mm.dtype_out") == 8
    assert seen.names.count("aten.mm.out") == seen.names.count("aten.addmm.dtype_out") == 4
    # What is added to elsewhere has a number per token.
    assert not {"aten.add_.Tensor", "aten.addmm_.default"} & set(seen.names)
    assert {g.dtype for g in gradients} == {torch.bfloat16}
    assert [list(g.shape) for g in gradients] == [[ROWS, 5], [WIDTH, 5]]


@pytest.mark.parametrize(("with_entropy", "rows"), [(False, 16), (True, 13 + 2)])
def test_a_forward_pass_holds_one_float32_chunk(device, with_entropy, rows):
    # Of 16 rows a tile of 2 leaves 14: 64 rows in 5 chunks of 13. The weight in float32 would be
    # 64 rows more.
    seen, _ = run(device, 64, with_entropy, backward=False)
    assert rows <= seen.peak_bytes / ROW_BYTES < rows + 0.5


@pytest.mark.parametrize(("with_entropy", "rows"), [(False, 16 + 8), (True, 13 + 2 + 6.5)])
def test_a_backward_pass_holds_its_gradient_too(device, with_entropy, rows):
    seen, _ = run(device, 5, with_entropy)
    gradient = 5  # of the weight, [4096, 5] in float32
    assert rows <= seen.peak_bytes / ROW_BYTES - gradient < rows + 0.5


@pytest.mark.parametrize(
    ("width", "on_cpu", "rows"),
    [
        (152_064, False, 1765),  # 2^30 / (4 * 152064)
        (19_008, False, 4096),
        (10**9, False, 1),
        (152_064, True, 330),  # 192 * 2^20 / (4 * 152064) = 331.0 less a little
    ],
)
def test_chunk_sizes(width, on_cpu, rows):
    assert default_chunk_size(4 * width, on_cpu) == rows


@pytest.fixture
def a_gpu(monkeypatch):
    """A labelled GPU, whose memory holds NaN until it is written to."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    with labelled_gpu() as seen:
        yield seen
    torch.use_deterministic_algorithms(False)


def passes(dtype, with_entropy, device="cpu", *, rows=50, width=416, size=24, scale=3):
    """Outputs and gradients in float64 of logits up to 60, in chunks of a third of the rows."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(rows, size, generator=generator).bfloat16().to(device, dtype)
    weight = (scale * torch.randn(width, size, generator=generator)).bfloat16().to(device, dtype)
    targets = torch.randint(width - 16, (rows,), generator=generator).to(device)
    upstream = torch.randn(2, rows, generator=generator).to(device)
    hidden.requires_grad_(), weight.requires_grad_()
    outputs = linear_logprobs(
        hidden, weight, targets, None,
        vocab_size=width - 16, temperature=0.7, with_entropy=with_entropy, chunk_size=rows // 3,
    )  # fmt: skip
    outputs = [x for x in outputs if x is not None]
    sum((u * x).sum() for u, x in zip(upstream, outputs)).backward()
    found = torch.stack(outputs).detach(), hidden.grad, weight.grad
    assert {x.device.type for x in found} == {device}
    return [x.cpu().double() for x in found]


@pytest.mark.parametrize("with_entropy", [False, True])
def test_values_and_gradients_equal_float64(a_gpu, with_entropy):
    exact = passes(torch.float64, with_entropy, "cuda")
    assert not a_gpu.only_cuda
    found = passes(torch.bfloat16, with_entropy, "cuda")
    # Of 50 rows in 4 chunks, or with entropy in 4 of a tile less, scores twice and a gradient once.
    assert a_gpu.only_cuda == ["aten::mm.dtype_out"] * 4 + [
        "aten::mm.dtype_out", "aten::addmm.dtype_out"
    ] * 4  # fmt: skip
    torch.testing.assert_close(found[0], exact[0], rtol=0, atol=2e-5)
    for gradient, expected in zip(found[1:], exact[1:], strict=True):
        # The chunk's gradient and the result are each rounded once, by at most 2^-9.
        assert (gradient - expected).norm() < 2**-8 * expected.norm()


def test_a_cpu_rounds_the_scores(a_gpu):
    # Of up to 60, to 2^-3: a hundred times the error above, and what old log-probabilities have.
    found, exact = (passes(dtype, with_entropy=True) for dtype in (torch.bfloat16, torch.float64))
    assert (found[0] - exact[0]).abs().max() > 2e-2
    # z_t and the logarithm of the sum are off by no more than the largest score, 65.7, by 2^-2.
    on_a_gpu = passes(torch.bfloat16, True, "cuda")
    assert (found[0] - on_a_gpu[0])[0].abs().max() < 2 * 2**-2 / 0.7
    assert score_chunks.CPU_CHUNK_BYTES == 192 * 2**20
