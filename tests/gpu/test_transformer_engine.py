"""Transformer Engine's layers and optimizer without a GPU: its own Python over stand-in kernels.

Slow: the version that requirements/gpu.txt pins is downloaded once (0.7 MB) and kept in pytest's
cache directory; without a network and without the file the tests fail and say what they need.
Processes of their own import it (te_site.py says how), so that no other test sees it. The stand-in
kernels (te_extension.py) compute in plain torch, so that whole models run, forward, backward and
update, and agree with the local layers to float32's rounding.

Not exercised: every compiled kernel (products, norms, rotation, cuDNN's attention, Adam), FP8
products, the loading of the libraries, NCCL, memory and speed.
"""

import sys
from pathlib import Path

import pytest
import torch

from tests.dumped import MODEL
from tests.gpu import te_jobs, te_site
from tests.models.built import write_hf
from tests.parallel.training import Layout, run_layout
from tests.roles.test_frozen_attention import CASES as FROZEN
from tests.run.checkpoint.test_load import SAVED_AT, train
from tests.weights.tiny_hf import FAMILIES, write_tiny_hf
from tests.workers import WorkerPool
from tools.smoke.parity import reference as write_reference
from tools.smoke.sizes import SMALL

pytestmark = pytest.mark.slow

LINEAR = (
    "self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2",
)  # fmt: skip


@pytest.fixture(scope="module")
def engine(request, tmp_path_factory):
    """Processes that find Transformer Engine, and no GPU."""
    site = tmp_path_factory.mktemp("site")
    kept = Path(request.config.cache.mkdir("transformer_engine"))
    te_site.make_site(te_site.find_wheel(kept, te_site.pinned_version()), site)
    # One that is imported already is not hidden on a CPU.
    pool = WorkerPool("spawn", first=["transformer_engine.pytorch"])
    plain = pool.run

    def run(*arguments):
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(site)  # inherited by processes that are spawned now
            patch.setenv("CUDA_VISIBLE_DEVICES", "")
            return plain(*arguments, timeout_seconds=250)

    pool.run = run
    yield pool
    pool.close()
    assert str(site) not in sys.path and te_site.EXTENSION not in sys.modules, "it leaks"


@pytest.fixture(scope="module")
def hf_paths(tmp_path_factory):
    """An actor of Llama with scaled frequencies, one of Qwen3 with YaRN, a critic of Qwen2."""
    directory = tmp_path_factory.mktemp("hf")
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    return {
        "llama": write_hf(directory / "llama", family="llama"),
        "qwen3": write_hf(directory / "qwen3", {"rope_scaling": yarn}, family="qwen3", tied=True),
        "critic": write_hf(directory / "critic"),
    }


def test_megatron_core_takes_it(engine):
    (found,) = engine.run(1, te_jobs.taken)
    assert found == {
        "version": te_site.pinned_version(),
        "HAVE_TE": True,
        "Adam": ["transformer_engine.pytorch.optimizers.fused_adam.FusedAdam"] * 2,
        "torch's optimizer": False,
        "rotations": ["megatron.core.extensions.transformer_engine"] * 2,
        "norm and scale": ["transformer_engine_torch"] * 2,
    }


def test_it_knows_every_keyword(engine):
    (unknown,) = engine.run(1, te_jobs.unknown_keywords)
    assert unknown == {}


@pytest.fixture(scope="module")
def built(engine, tmp_path_factory):
    (found,) = engine.run(1, te_jobs.built, tmp_path_factory.mktemp("families"))
    return found


def test_the_name_table_has_the_built_names(built, subtests):
    assert len(built) == len(FAMILIES) * 2 * 2
    for case, specs in built.items():
        with subtests.test(case):
            found, local = specs["transformer_engine"], specs["local"]
            fused = "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"
            assert fused in found["names"] and fused not in local["names"]
            assert not any(".input_layernorm." in name for name in found["names"])
            assert found["matched"] == local["matched"] and len(found["matched"]) > 10
            covered = {name for names in found["matched"] for name in names}
            assert covered == set(found["wanted"])


def test_gradients_accumulate_in_the_layers_once_ddp_is_built(built, subtests):
    linear = {f"decoder.layers.{layer}.{name}" for layer in (0, 1) for name in LINEAR}
    for case, specs in built.items():
        with subtests.test(case):
            before, after = specs["transformer_engine"]["accumulate"]
            assert before == dict.fromkeys(linear, False)
            assert after == dict.fromkeys(linear, True)
            assert specs["local"]["accumulate"] == ({}, {})


def test_fused_kernels_run_and_add_weight_gradients_to_ddps_buffer(engine, hf_paths):
    ((added, calls),) = engine.run(1, te_jobs.one_microbatch, hf_paths["llama"])
    layers = (f"decoder.layers.{layer}" for layer in range(4))
    assert set(added) == {f"{layer}.{name}.weight" for layer in layers for name in LINEAR}
    # Of 4 layers: four products forward, and two backward for each; query and key are rotated.
    assert calls == {
        "generic_gemm": 4 * 4 * 3, "fused_rope_forward": 4 * 2, "fused_rope_backward": 4 * 2,
        "fused_attn_fwd": 4, "fused_attn_bwd": 4,
    }  # fmt: skip


def test_meta_is_refused(engine, hf_paths):
    with pytest.raises(AssertionError, match="device=meta needs model.layer_spec=local"):
        engine.run(1, te_jobs.on_meta, hf_paths["llama"])


TWO = ((0, 1, 2), (3, 4, 5, 6))
LAYOUTS = {
    "one rank": Layout(split=(TWO,)),
    "TP2 SP, full recompute": Layout(tp=2, sp=True, recompute="full", split=(TWO,)),
    "DP2 distributed, overlap": Layout(
        dp=2, distributed=True, overlap=True, split=(((0, 1), (2, 3)), ((4,), (5, 6)))
    ),
    "PP2 VPP2": Layout(pp=2, vpp=2, split=(TWO,)),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_updates_are_those_of_local_layers_and_torchs_adam(engine, workers, hf_paths, layout):
    """float32. Largest errors seen: gradient 1.3e-6 of its norm, output 3.8e-6, weight 6e-8."""
    expected = workers.run(layout.world_size, run_layout, hf_paths, layout)
    found = engine.run(layout.world_size, te_jobs.train, hf_paths, layout)
    for of_rank, wanted_of_rank in zip(found, expected, strict=True):
        for role, wanted in wanted_of_rank.items():
            check_updates(of_rank[role], wanted)


def check_updates(found, wanted):
    assert (found.outputs - wanted.outputs).abs().max() < 1e-5
    assert found.losses == pytest.approx(wanted.losses, rel=1e-5)
    assert found.grad_norms == pytest.approx(wanted.grad_norms, rel=1e-5)
    assert found.gradients.keys() == wanted.gradients.keys()
    for name, gradient in wanted.gradients.items():
        error = (found.gradients[name] - gradient).norm() / gradient.norm()
        assert gradient.any() and error < 5e-6, f"gradient of {name}: {error:.1e}"
    for name, weight in wanted.weights.items():
        torch.testing.assert_close(found.weights[name], weight, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("layout,dtype", FROZEN.values(), ids=FROZEN)
def test_frozen_attention_offload_and_resume(engine, tmp_path, layout, dtype):
    """The first norm, which lies with the frozen projection, learns."""
    hf = str(write_tiny_hf(tmp_path / "hf", **MODEL))
    root = tmp_path / "checkpoints"
    engine.run(2, te_jobs.learn_with_frozen_attention, hf, root, layout, dtype)


@pytest.mark.parametrize("saved_at", [0, SAVED_AT])
@pytest.mark.parametrize("distributed", [False, True])
def test_a_run_resumes_with_other_layers_and_another_adam(
    engine, workers, hf_paths, tmp_path, distributed, saved_at
):
    """bfloat16: the layers differ by its rounding, up to 3 % seen; the same resume bit for bit.

    Each update moves the loss by more than its half.
    """
    jobs = {"te": (engine, te_jobs.save_or_resume), "local": (workers, train)}
    settings = ("bfloat16", distributed, "adamw")

    def losses(kind, saved_by, load):
        pool, job = jobs[kind]
        root = tmp_path / saved_by
        (found,) = pool.run(1, job, hf_paths["critic"], root, settings, 1, 1, load, saved_at)
        return found[0]

    straight = {kind: losses(kind, kind, False) for kind in jobs}
    assert losses("te", "te", True) == straight["te"][saved_at:]
    for kind, saved_by in (("te", "local"), ("local", "te")):
        resumed = losses(kind, saved_by, True)
        assert resumed == pytest.approx(straight[saved_by][saved_at:], rel=0.05)


def test_the_smoke_tests_section(engine, tmp_path):
    engine.run(1, write_reference, SMALL, tmp_path)
    (rows,) = engine.run(1, te_jobs.smoke, tmp_path)
    assert [row.case for row in rows if not row.passed] == []
    assert len(rows) == len(SMALL.attention) + 2 * 3
    updates = [row.case for row in rows if ", update by " in row.case]
    assert all(case.endswith("transformer_engine's FusedAdam") for case in updates)
    assert all(row.figures["error"] > 0 for row in rows)


def test_fp8_is_current_scaling_outside_attention(engine, hf_paths):
    (found,) = engine.run(1, te_jobs.fp8, hf_paths["llama"])
    assert found == (True, "Float8CurrentScaling", False)
