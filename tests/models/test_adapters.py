"""An adapter beside one layer: merged weights, and a norm that the layer has inside.

What adapters compute and learn in megatron-core's layers is in tests/distributed/test_adapters.py.
Transformer Engine's layer is a stand-in here: what it hands to an adapter is its input before the
norm.
"""

import pytest
import torch

HIDDEN, RANK, FACTOR = 8, 3, 0.5


class NormedLinear(torch.nn.Module):
    """As Transformer Engine's layer with the norm inside: output and bias."""

    def __init__(self, size):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(size, HIDDEN))
        self.layer_norm_weight = torch.nn.Parameter(torch.rand(HIDDEN))
        self.eps = 1e-3

    def normed(self, inputs):
        mean = inputs.square().mean(-1, keepdim=True)
        return inputs * (mean + self.eps).rsqrt() * self.layer_norm_weight

    def forward(self, inputs):
        return torch.nn.functional.linear(self.normed(inputs), self.weight), None


def adapted(targets, num_rows, num_groups, with_adapter):
    """(what the layer with its adapter returns, with merged weights), a worker's function."""
    from vapo_megatron.config import ParallelConfig
    from vapo_megatron.models.adapters import Adapter, Pairs, attach
    from vapo_megatron.parallel import groups

    groups.initialize(ParallelConfig())
    torch.manual_seed(0)
    parent = torch.nn.Module()
    parent.linear = NormedLinear(sum(num_rows))
    initial = {name: torch.randn(RANK, HIDDEN) for name in with_adapter}
    pairs = Pairs(targets, num_rows, num_groups, by_columns=False)
    adapter = Adapter(parent.linear.weight, pairs, initial, FACTOR, sequence_parallel=False)
    before = torch.equal(adapter.merged(parent.linear.weight), parent.linear.weight)
    with torch.no_grad():
        adapter.B.copy_(torch.randn_like(adapter.B))
    attach(parent, "linear", adapter)
    inputs = torch.randn(5, 1, HIDDEN)
    output, bias = parent.linear(inputs)
    merged = adapter.merged(parent.linear.weight)
    expected = torch.nn.functional.linear(parent.linear.normed(inputs), merged)
    changed = [bool(x) for x in (merged != parent.linear.weight).any(1)]
    return output.detach(), expected.detach(), bias, changed, before


@pytest.mark.parametrize(
    ("targets", "num_rows", "num_groups", "with_adapter", "changed"),
    [
        (("gate_proj", "up_proj"), (4, 4), 1, ("gate_proj", "up_proj"), [True] * 8),
        (("gate_proj", "up_proj"), (4, 4), 1, ("up_proj",), [False] * 4 + [True] * 4),
        # Two groups of two query rows, a key row and a value row.
        (("q_proj", "k_proj", "v_proj"), (4, 2, 2), 2, ("q_proj", "v_proj"),
         [True, True, False, True] * 2),
        # A piece of one group, without values.
        (("q_proj", "k_proj", "v_proj"), (3, 1, 0), 1, ("v_proj", "k_proj"),
         [False, False, False, True]),
    ],
)  # fmt: skip
def test_an_adapter_is_what_merging_gives(
    workers, targets, num_rows, num_groups, with_adapter, changed
):
    arguments = (targets, num_rows, num_groups, with_adapter)
    ((output, expected, bias, found, before),) = workers.run(1, adapted, *arguments)
    assert torch.allclose(output, expected, atol=1e-5) and bias is None
    assert found == changed and before
