"""How many operations GAE dispatches: what a GPU would launch.

Not exercised: a GPU, of which some operations are several kernels, the same number at every size.
The meta device stands for it: shapes without data, one slice in place of the CPU's many.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vapo_megatron.algorithm.gae import decoupled_gae


class CountOperations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations(num_tokens, num_responses, device="meta", **lambdas):
    tokens = torch.zeros(num_tokens, device=device)
    cu_seqlens = torch.zeros(num_responses + 1, dtype=torch.int32, device=device)
    cu_seqlens[-1] = num_tokens
    with CountOperations() as counter:
        decoupled_gae(tokens, tokens, cu_seqlens, **lambdas)
    return counter.count


def per_response(num_responses, device="meta"):
    return torch.zeros(num_responses, dtype=torch.float64, device=device)


def test_twice_the_tokens_are_one_more_level_of_the_scan():
    for lam in (0.9, per_response(512)):
        counts = [operations(2**k, 512, lambda_actor=lam) for k in range(14, 23)]
        grown = {more - fewer for fewer, more in zip(counts, counts[1:])}
        # 19 in each of two scans, one for advantages and one for returns: views and arithmetic.
        assert len(grown) == 1 and max(grown) <= 40, counts
        assert counts[-1] < 1100  # 4.2 million tokens; a loop takes some for each of up to 16384


def test_responses_add_no_operations():
    counts = {operations(2**20, b, lambda_actor=per_response(b)) for b in (2, 64, 512, 4096)}
    assert len(counts) == 1, counts


def test_a_cpu_adds_some_for_every_65536_tokens():
    one, eight = (operations(n * 65536, 2, "cpu", lambda_actor=0.9) for n in (1, 8))
    assert eight - one < 3 * 40 + 7 * 80


def test_equal_lambdas_are_computed_once():
    lams = per_response(2)
    once = operations(500, 2, lambda_actor=lams, lambda_critic=lams)
    twice = operations(500, 2, lambda_actor=lams, lambda_critic=lams.clone())
    assert once < 0.6 * twice
    assert operations(500, 1, lambda_actor=0.5, lambda_critic=0.5) < 0.6 * operations(
        500, 1, lambda_actor=0.5, lambda_critic=0.6
    )
