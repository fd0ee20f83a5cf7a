"""A whole step of training with tensors that pass for a GPU's: none is on the wrong device.

Two processes train on dumped responses and take the CUDA branches, this package's and
megatron-core's own, with true numbers (tests/parallel/labels.py, labelled_cuda.py). A tensor made
without device=, a mask left on the host, or a count summed there over a group of GPUs raises. What
they compute is compared with a CPU's step, bit by bit where the branches round alike.

Not exercised: kernels, streams, NCCL, Transformer Engine, torch.compile; vLLM; checkpoints; what
autograd's engine adds up by itself.
"""

import contextlib
import os
import sys
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch.distributed as dist

from tests.dumped import MODEL, config, dump
from tests.parallel.labelled_cuda import labelled_gpu
from tests.weights.tiny_hf import write_tiny_hf
from tests.workers import WorkerPool

WORLD_SIZE = 2
# With a large epsilon an update shows the gradient's scale, which Adam would hide.
OPTIMIZER = {
    "actor_learning_rate": 1e-2, "critic_learning_rate": 1e-2, "adam_eps": 1e-2,
    "actor_warmup_updates": 0, "critic_warmup_updates": 0,
}  # fmt: skip


class Case(NamedTuple):
    """A layout of two processes, and what they train with."""

    parallel: dict[str, Any]
    algorithm: dict[str, Any]
    collectives: set[str]
    """ProcessGroup's methods, of those that it needs."""
    dtype: str = "float32"
    fuses: bool = False
    """Use megatron-core's fused functions, as where there is a compiler; they round otherwise."""
    heads: int = 2
    """More than the 2 of key and value, which a GPU repeats in float32, round otherwise too."""


CASES = {
    "data parallel": Case(
        {
            "use_distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
        },
        {
            "kl_coef": 0.1,
            "advantage_whitening": True,
            "overlong_filtering": True,
            "policy_loss": "dis",
            "value_range": [-2.0, 2.0],
            "gae_length": "action",
        },
        {"reduce_scatter_single_coalesced", "all_gather_single_coalesced", "all_to_all_single"},
    ),
    "tensor parallel": Case(
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "recompute": "selective"},
        {"entropy_coef": 0.01, "sampler_correction": "tis", "value_clip": 0.2},
        {"reduce_scatter_single", "all_gather_single", "allreduce"},
        dtype="bfloat16",
        fuses=True,
        heads=4,
    ),
    "pipeline": Case(
        {"pipeline_model_parallel_size": 2, "recompute": "full"},
        {"loss_aggregation": "sample", "sampler_correction": "icepop", "value_range": [-2.0, 2.0]},
        {"send", "recv", "broadcast"},
        heads=4,
    ),
}


class Result(NamedTuple):
    """Of one rank."""

    metrics: dict[str, float]
    weights: dict[tuple[str, str], np.ndarray]
    """By role and HF name, after the step."""
    collectives: set[str]
    only_cuda: set[str]


def step(hf, dumped, run_dir, case, on_gpu):
    """One step of both roles -> Result."""
    dist.destroy_process_group()
    settings = config(
        hf,
        model={"dtype": case.dtype},
        parallel={"world_size": WORLD_SIZE, "max_tokens_per_microbatch": 48, **case.parallel},
        algorithm=case.algorithm,
        optimizer=OPTIMIZER,
        logging={"run_dir": str(run_dir), "tensorboard": False, "progress": "off"},
    )
    gpu = labelled_gpu(int(os.environ["RANK"])) if on_gpu else contextlib.nullcontext()
    with gpu as seen:
        from vapo_megatron.models import build
        from vapo_megatron.parallel import backend, megatron_on_cpu
        from vapo_megatron.training.step import StepTrainer
        from vapo_megatron.weights.gather import gather_hf_tensors

        build._can_compile = lambda: case.fuses
        assert backend.device().type == ("cuda" if on_gpu else "cpu")
        is_translated = hasattr(sys.modules["megatron.core"], megatron_on_cpu._STAND_IN)
        with StepTrainer(settings, dumped) as trainer:
            assert trainer.device_schedule.is_on == on_gpu != is_translated
            metrics = trainer.train_step(0)
            weights = {}
            for role in ("actor", "critic"):
                placed = getattr(trainer, role).placed
                with placed.held("parameters"):
                    places = {p.device for chunk in placed.model for p in chunk.parameters()}
                    assert places == {backend.device()}
                    for name, tensor in gather_hf_tensors(
                        placed.chunks, trainer.shape, trainer.ranks, role=role
                    ):
                        weights[role, name] = tensor.float().cpu().numpy()
    if seen is None:
        return Result(metrics, weights, set(), set())
    return Result(metrics, weights, set(seen.collectives), set(seen.only_cuda))


def on_gpus(tasks):
    """`step` of each task, on processes forked from this one once it has imported all."""
    dist.destroy_process_group()
    sys.modules["wandb"] = None  # megatron-core imports it where it can, which takes a while
    with labelled_gpu():
        import torch._dynamo  # noqa: F401  as torch's optimizers do at their first step

        import vapo_megatron.training.step  # noqa: F401
    with contextlib.closing(WorkerPool("fork")) as pool:
        return [pool.run(WORLD_SIZE, step, *task) for task in tasks]


@pytest.fixture(scope="module")
def results(workers, tmp_path_factory):
    """Case -> (of GPUs, of CPUs), each by rank."""
    tmp = tmp_path_factory.mktemp("gpu")
    for heads in (2, 4):
        write_tiny_hf(tmp / f"hf{heads}", **{**MODEL, "heads": heads})
    workers.run(1, dump, tmp / "replay", [1], 1)

    def task(name, on_gpu):
        case = CASES[name]
        return tmp / f"hf{case.heads}", tmp, tmp / f"{name} {on_gpu}", case, on_gpu

    # Started by itself: the others have imported megatron-core for a CPU.
    with contextlib.closing(WorkerPool("spawn")) as pool:
        tasks = [task(name, True) for name in CASES]
        (gpus,) = pool.run(1, on_gpus, tasks, timeout_seconds=300)
    cpus = [workers.run(WORLD_SIZE, step, *task(name, False)) for name in CASES]
    return dict(zip(CASES, zip(gpus, cpus)))


def test_a_gpus_step_has_the_bits_of_a_cpus(results):
    for gpu, cpu in zip(*results["data parallel"], strict=True):
        assert gpu.metrics == cpu.metrics and len(gpu.metrics) > 30
        assert gpu.weights.keys() == cpu.weights.keys() and len(gpu.weights) > 50
        different = [n for n, w in gpu.weights.items() if not np.array_equal(w, cpu.weights[n])]
        assert not different


@pytest.mark.parametrize(("name", "bits"), [("pipeline", 20), ("tensor parallel", 7)])
def test_where_they_round_otherwise_they_agree(results, name, bits):
    """bits: of 24 in float32 and 8 in bfloat16."""
    for gpu, cpu in zip(*results[name], strict=True):
        for metric in ("actor/entropy", "actor/loss", "actor/grad_norm", "critic/loss"):
            expected = pytest.approx(cpu.metrics[metric], rel=2.0 ** (1 - bits))
            assert gpu.metrics[metric] == expected, metric
        for weight, value in cpu.weights.items():
            difference = np.linalg.norm(gpu.weights[weight] - value)
            assert difference < 2.0**-bits * np.linalg.norm(value), weight


def test_what_only_a_gpu_has_is_used_in_bfloat16(results):
    for name, (gpus, _) in results.items():
        # Scores and their gradients in float32, and flash attention.
        wider = {"aten::mm.dtype_out", "aten::addmm.dtype_out"}
        expected = {*wider, "varlen_attn"} if CASES[name].dtype == "bfloat16" else set()
        assert all(gpu.only_cuda == expected for gpu in gpus), name


def test_collectives_ran_over_groups_of_gpus(results):
    for name, (gpus, _) in results.items():
        assert all(gpu.collectives >= CASES[name].collectives for gpu in gpus), name
