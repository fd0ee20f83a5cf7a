"""A run whose sequences are cut over ranks: its metrics and weights are those of one process.

Replayed, so that all runs have the same responses; two steps with every role: actor, critic,
reference and sampler correction. Gradients are the subject of tests/distributed. Not exercised: a
sampler (tests/e2e), a GPU.
"""

import pytest

from tests.dumped import MODEL, dump
from tests.weights.tiny_hf import write_tiny_hf
from tests.whole_run import measured, settings, trainer

ALGORITHM = {"kl_coef": 0.1, "sampler_correction": "tis", "mini_batch_size": 8, "policy_steps": 2}
RATES = {
    "actor_learning_rate": 1e-3, "critic_learning_rate": 1e-3, "actor_warmup_updates": 0,
    "critic_warmup_updates": 0,
}  # fmt: skip
LAYOUTS = {
    "CP2": {"world_size": 2, "context_parallel_size": 2},
    "CP2 TP2 SP": {
        "world_size": 4, "context_parallel_size": 2, "tensor_model_parallel_size": 2,
        "sequence_parallel": True, "offload": True,
    },
    "CP2 DP2": {"world_size": 4, "context_parallel_size": 2, "overlap_grad_reduce": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def paths(workers, tmp_path_factory):
    """(model, run directory with a dump)."""
    root = tmp_path_factory.mktemp("context_parallel")
    workers.run(1, dump, root / "dumped/replay", [1, 2], 1)
    return write_tiny_hf(root / "hf", **MODEL), root / "dumped"


def fit(paths, run_dir, parallel, steps):
    """A whole run, in a world of the trainer's; a worker's function."""
    tree = {
        "algorithm": {**ALGORITHM, "policy_steps": steps},
        "checkpoint": {"every_steps": 1},
        "parallel": parallel,
        "optimizer": RATES,
    }
    with trainer(settings(paths[0], run_dir, **tree), paths[1]) as made:
        made.fit()


def run(workers, paths, run_dir, parallel, steps=2):
    """The rows of a run's metrics, without its times and memory."""
    size = parallel.get("world_size", 1)
    workers.run(size, fit, paths, run_dir, parallel, steps)
    return measured(run_dir)


@pytest.fixture(scope="module")
def expected(workers, paths):
    return run(workers, paths, paths[1].parent / "one", {})


def check(found, expected):
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    for row, other in zip(found, expected):
        assert row.keys() == other.keys()
        for name, value in row.items():
            assert value == pytest.approx(other[name], rel=2e-4, abs=2e-6), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_metrics_are_those_of_one_process(workers, paths, expected, tmp_path, layout):
    check(run(workers, paths, tmp_path, LAYOUTS[layout]), expected)


def test_a_run_resumes_with_another_size(workers, paths, expected, tmp_path):
    run(workers, paths, tmp_path, LAYOUTS["CP2"], steps=1)
    check(run(workers, paths, tmp_path, LAYOUTS["CP2 DP2"]), expected)
