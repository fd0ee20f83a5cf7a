"""FLOPs by hand, by torch's own counter over the package's models, and in the limits.

Peaks are data sheets' figures; whether a GPU reaches them is not a test's to say.
"""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.models.built import Layout, build, call, write_hf
from tests.planning.shapes import small_shape
from vapo_megatron.models.known import known_shape
from vapo_megatron.planning import flops
from vapo_megatron.weights.table import parameter_count

SHAPE = small_shape(hidden=4, layers=3, heads=2, kv_heads=1, head=2, ffn=5, vocab=7)


def test_a_layer_by_hand():
    # q 2 heads of 2 channels: 4 x 4; k and v: 4 x 2 each; output 4 x 4; gate, up, down 4 x 5 each.
    # 16 + 8 + 8 + 16 + 60 = 108 weights, 216 FLOPs a token, of which there are 3 + 1 = 4: 864.
    # Pairs: 1 + 2 + 3, and 1. Each: 2 FLOPs x 4 channels for the score and again for the value, 16.
    assert flops.causal_pairs([3, 1]) == 7
    assert flops.layer_forward_flops(SHAPE, [3, 1]) == 864 + 7 * 16


def test_forward_and_training_by_hand():
    # 3 layers of 864 + 112 = 976; output 2 * 7 * 4 = 56 a position, value head 2 * 4 = 8.
    assert flops.forward_flops(SHAPE, [3, 1], role="actor") == 3 * 976 + 4 * 56
    assert flops.forward_flops(SHAPE, [3, 1], role="actor", num_outputs=2) == 3 * 976 + 2 * 56
    assert flops.forward_flops(SHAPE, [3, 1], role="critic") == 3 * 976 + 4 * 8
    assert flops.forward_flops(SHAPE, [3, 1], role="critic", num_outputs=0) == 3 * 976
    assert flops.training_flops(SHAPE, [3, 1], role="actor", num_outputs=2) == 3 * (2928 + 112)
    assert flops.forward_flops(SHAPE, [], role="actor") == 0


def test_packing_is_a_sum():
    alone = sum(flops.training_flops(SHAPE, [n], role="actor") for n in (5, 1, 9))
    assert flops.training_flops(SHAPE, [9, 5, 1], role="actor") == alone


def test_six_times_the_parameters():
    """PaLM's count: 6 N + 12 L q (l + 1) / 2, N without embedding, norms and biases."""
    shape, length = known_shape("Qwen2.5-7B"), 8192
    vectors = 28 * (2 * 3584 + 3584 + 2 * 4 * 128) + 3584
    weights = parameter_count(shape) - vectors - 152064 * 3584
    # 7.62e9 parameters, of which the embedding has 0.545e9.
    assert weights == 7070285824
    expected = 6 * weights + 12 * 28 * 3584 * (length + 1) // 2
    assert flops.training_flops(shape, [length], role="actor") == expected * length


def _counted(hf_path: str, role: str, lengths: list[int]) -> tuple[int, int, int, int]:
    """Forward, and forward and backward: torch's count of products, and this module's."""
    built = build(hf_path, Layout(), role, layer_spec="local")
    ids = [torch.randint(built.shape.vocab_size, (n,)) for n in lengths]
    # The other implementations are a single operation, which the counter leaves out on a CPU.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        output = call(built.chunks[0], ids)
        forward = counter.get_total_flops()
        output.sum().backward()
    keywords = {"role": role, "num_outputs": sum(lengths) if role == "critic" else 0}
    return (
        forward,
        flops.forward_flops(built.shape, lengths, **keywords),
        counter.get_total_flops(),
        flops.training_flops(built.shape, lengths, **keywords),
    )


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_torch_counts_the_same(workers, tmp_path, role):
    """In sequences of one token, where causal attention and all of it are the same pair.

    The actor's model returns hidden states: none of its outputs is computed here.
    """
    path = write_hf(tmp_path)
    ((forward, expected, both, training),) = workers.run(1, _counted, path, role, [1] * 12)
    assert forward == expected
    assert both == training


def test_utilization():
    # 494.5e12 FLOPs in half a second on a peak of 989e12: all of it; two such GPUs: half.
    assert flops.utilization(494.5e12, 0.5, 989e12) == 1.0
    assert flops.utilization(494.5e12, 0.5, 2 * 989e12) == 0.5


@pytest.mark.parametrize(
    "name,peak",
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA B300 SXM6 AC", 2250e12),
        ("NVIDIA GB300", 2500e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_peaks(name, peak):
    assert flops.bf16_peak_flops(name) == peak
