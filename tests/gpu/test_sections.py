"""The sections of tools/gpu_smoke.py on a CPU, at the tool's small sizes.

Not exercised: anything of CUDA's. On a CPU bfloat16 attention is scaled_dot_product_attention, not
torch's varlen attention; offload moves from host to host; no MFU and no GPU memory is known.
"""

import contextlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tools.smoke import attention, parity
from tools.smoke.sizes import FULL, SMALL, AttentionCase
from vapo_megatron.planning import flops
from vapo_megatron.weights.table import parameter_count

GIB = 2**30


def _section(module, function, directory, *arguments):
    """Run one section in a worker process, where megatron-core may be."""
    import importlib

    section = getattr(importlib.import_module(f"tools.smoke.{module}"), function)
    return section(SMALL, Path(directory), *arguments)


@pytest.fixture(scope="module")
def reference(workers, tmp_path_factory):
    """The reference's directory."""
    directory = tmp_path_factory.mktemp("reference")
    workers.run(1, _section, "parity", "reference", str(directory))
    return directory


def parity_rows(workers, directory):
    (rows,) = workers.run(1, _section, "parity", "parity", str(directory))
    return {row.case: row for row in rows}


CASES = [
    f"{role} {dtype}, {way}"
    for dtype in ("float32", "bfloat16")
    for role in ("actor", "critic")
    for way in ("forward", "backward")
]


def test_parity(workers, reference):
    rows = parity_rows(workers, reference)
    assert list(rows) == CASES
    assert all(row.passed for row in rows.values()), rows
    # Packed in another order of sums: not the same bits, or nothing would have been compared.
    assert all(row.figures["error"] > 0 for row in rows.values())


def test_parity_sees_tf32(workers, reference, tmp_path):
    """Weights that are off by 2^-11 of themselves, as TF32 rounds: float32's rows must fail."""
    for role in ("actor", "critic"):
        weights = load_file(reference / role / "model.safetensors")
        torch.manual_seed(0)
        signs = {name: torch.randn_like(w).sign() for name, w in weights.items()}
        rounded = {name: w * (1 + 2**-11 * signs[name]) for name, w in weights.items()}
        (tmp_path / role).mkdir()
        save_file(rounded, tmp_path / role / "model.safetensors")
    (tmp_path / "reference.pt").symlink_to(reference / "reference.pt")
    rows = parity_rows(workers, tmp_path)
    assert {case for case, row in rows.items() if not row.passed} == set(CASES[:4])


def test_parity_sees_a_bias_left_out(workers, reference, tmp_path):
    """Of one layer's query: bfloat16's rows must fail, too."""
    for role in ("actor", "critic"):
        weights = load_file(reference / role / "model.safetensors")
        weights["model.layers.1.self_attn.q_proj.bias"].zero_()
        (tmp_path / role).mkdir()
        save_file(weights, tmp_path / role / "model.safetensors")
    (tmp_path / "reference.pt").symlink_to(reference / "reference.pt")
    rows = parity_rows(workers, tmp_path)
    assert not any(rows[case].passed for case in CASES if case.endswith("backward"))


def test_bounds_by_hand():
    # 4 layers: 2 (6 * 4 + 1) = 50 products, sums of up to 8000: 2 * 2^-24 sqrt(400000) = 7.54e-5.
    # 2 (12 * 4 + 1) = 98 roundings of bfloat16: 2 * 2^-8 sqrt(98) = 0.0773; forward alone, 49.
    assert parity.rounding_bound(FULL.parity_shape, "float32") == pytest.approx(7.539e-5, rel=1e-3)
    assert parity.rounding_bound(FULL.parity_shape, "bfloat16") == pytest.approx(0.0773, rel=1e-3)
    forward = parity.rounding_bound(FULL.parity_shape, "bfloat16", passes=1)
    assert forward == pytest.approx(0.0547, rel=1e-3)


def _leaking() -> dict[str, float]:
    """Relative error of the output where two sequences are taken for one, by dtype."""
    apart = AttentionCase(heads=4, groups=2, head_dim=32, lengths=(33, 90))
    together = apart._replace(lengths=(123,))
    draws = [torch.randn(123, heads, 32) for heads in (4, 2, 2)]
    tensors = attention.Tensors(*draws, torch.randn(123, 128))
    (expected, *_) = attention.written_out(apart, tensors)
    return {
        dtype: parity.relative(attention.packed(together, tensors, dtype)[0], expected)
        for dtype in ("float32", "bfloat16")
    }


def test_attention(workers, tmp_path):
    (rows,) = workers.run(1, _section, "attention", "attention", str(tmp_path))
    assert [row.passed for row in rows] == [True] * 3, rows
    assert all(row.figures["error"] > 0 for row in rows[:2])
    # 12 heads * d = 4 * 32 a pair, forward and backward; two sequences of 128 * 129 / 2 pairs.
    timed = rows[2].figures
    assert timed["flops_per_second"] * timed["seconds"] == pytest.approx(12 * 128 * 2 * 8256)


def test_attention_sees_a_border_crossed(workers):
    (errors,) = workers.run(1, _leaking)
    case = AttentionCase(heads=4, groups=2, head_dim=32, lengths=(33, 90))
    for dtype, error in errors.items():
        assert error > 5 * attention.rounding_bound(case, dtype)


def test_logprobs(workers, tmp_path):
    (rows,) = workers.run(1, _section, "training", "logprobs", str(tmp_path))
    assert [row.case.split(",")[0] for row in rows] == ["fused", "plain", "mean"]
    assert all(row.passed for row in rows), rows
    assert all(row.figures["seconds"] > 0 for row in rows[:2])


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_updates(workers, tmp_path, role):
    arguments = ("training", "updates", str(tmp_path), "Qwen2.5-7B", role)
    ((forward, update),) = workers.run(1, _section, *arguments)
    assert forward.passed and update.passed
    assert update.case.startswith("Qwen2.5-7B shape, shrunk, 0.")
    # Responses of 8, 16, ..., 48 tokens, each after a prompt of 8.
    lengths = [16, 24, 32, 40, 48, 56]
    shape, _ = SMALL.trained_shape("Qwen2.5-7B", None)
    expected = flops.training_flops(shape, lengths, role=role, num_outputs=168)
    for row, share in ((forward, 1 / 3), (update, 1)):
        found = row.figures
        assert found["tokens"] == 216
        assert found["tokens_per_second"] * found["seconds"] == pytest.approx(216)
        assert found["model_flops_per_second"] * found["seconds"] == pytest.approx(expected * share)
    assert update.figures["grad_norm"] > 0 and update.figures["peak_bytes"] > 0


def _offload_that_spoils(directory):
    """The section where a number comes back as another one."""
    from vapo_megatron.roles.placed import PlacedModel

    honest = PlacedModel.held

    @contextlib.contextmanager
    def held(self, part):
        with honest(self, part):
            next(self.chunks[0].parameters()).data.flatten()[0] += 1
            yield

    PlacedModel.held = held
    try:
        return _section("offload", "offload", directory, "Qwen2.5-0.5B")
    finally:
        PlacedModel.held = honest


def test_offload(workers, tmp_path):
    arguments = ("offload", "offload", str(tmp_path), "Qwen2.5-0.5B")
    ((row,),) = workers.run(1, _section, *arguments)
    assert row.passed
    # A layer: 64 x 256 + 256 query, key, value; 128 x 64; 64 x 256 and 128 x 64; norms 2 x 64:
    # 49,536, twice; the embedding of 1,024 x 64, padded; a norm. 2 + 4 + 8 bytes each.
    assert row.figures["bytes"] == pytest.approx(14 * (2 * 49536 + 65536 + 64), rel=1e-3)
    assert row.figures["in_seconds"] > 0 and row.figures["out_seconds"] > 0
    ((row,),) = workers.run(1, _offload_that_spoils, str(tmp_path))
    assert not row.passed


def test_layers_that_fit():
    # 139 GiB: 0.7 * 149.2e9 / 22 = 4.749e9 parameters. Embedding and output of 152064 * 3584 have
    # 1.090e9, a layer 0.2331e9: (4.749 - 1.090) / 0.2331 = 15.7.
    shape, title = FULL.trained_shape("Qwen2.5-7B", 139 * GIB)
    assert (shape.num_layers, title) == (15, "Qwen2.5-7B shape, 15 of 28 layers")
    assert parameter_count(shape) * 22 <= 0.7 * 139 * GIB
    shape, title = FULL.trained_shape("Qwen2.5-1.5B", 139 * GIB)
    assert (shape.num_layers, title) == (28, "Qwen2.5-1.5B shape")
    assert FULL.trained_shape("Qwen2.5-7B", GIB)[0].num_layers == 1
