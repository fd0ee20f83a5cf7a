"""Value pretraining as a stage, and runs that start from its critic; replayed, in real processes.

Not exercised: the stage with a sampler, which it shares with every run, and a GPU.
"""

import itertools
import json
import shutil

import pytest
import torch
import torch.distributed as dist

from tests import jsonl
from tests.dumped import MODEL, NUM_RESPONSES, rollouts, write
from tests.sealed import seal
from tests.weights.tiny_hf import write_tiny_hf
from tests.whole_run import settings, trainer
from vapo_megatron.errors import CheckpointError, UserError
from vapo_megatron.rollout.source import StepRequest
from vapo_megatron.run.checkpoint.load import find_critic

STEPS, RATE, WARMUP, UPDATES = 4, 1e-2, 200, 20
STAGE = {"stage": "value_pretraining", "value_pretraining_steps": STEPS}
POLICY = {"value_pretraining_steps": 0, "policy_steps": 1}


def same_responses(root):
    """Every step has the same responses, which a critic can learn by heart; a worker's function."""
    for step in range(1, 10):
        write(root, rollouts(), step)


@pytest.fixture(scope="module")
def paths(workers, tmp_path_factory):
    """(model, run directory with a dump)."""
    root = tmp_path_factory.mktemp("value_stage")
    workers.run(1, same_responses, root / "dumped/replay")
    return write_tiny_hf(root / "hf", **MODEL), root / "dumped"


def fit(paths, run_dir, algorithm, sections):
    """A whole run: V of the responses before and after it and the critic's updates, or a mistake.

    A worker's function, in a world of the trainer's.
    """
    size = dist.get_world_size()
    # One mini-batch, so that the order which a step draws does not matter.
    updates = {"mini_batch_size": NUM_RESPONSES, "critic_updates_per_step": UPDATES}
    tree = {
        "algorithm": {**updates, **algorithm},
        "parallel": {"world_size": size, "tensor_model_parallel_size": size},
        "optimizer": {"critic_learning_rate": RATE, "critic_warmup_updates": WARMUP},
    }
    tree |= {name: {**tree.get(name, {}), **fields} for name, fields in sections.items()}
    try:
        with trainer(settings(paths[0], run_dir, **tree), paths[1]) as made:
            resume, seen = made._resume, []
            made._resume = lambda: (resume(), seen.append(values(made)))[0]
            made.fit()
            return seen[0], values(made), made.critic.trained.num_updates
    except UserError as error:
        return str(error)


def values(trainer):
    """V of every response of the first step, in the order of the dump."""
    from vapo_megatron.parallel.minibatches import make_microbatches

    scored, _ = trainer.source.rollouts(StepRequest(0, 0, trainer.phase))
    _, batch, plan = trainer._distribute(scored, 0)
    sizes = itertools.chain(*plan.microbatch_sizes(trainer.ranks.dp_rank))
    found = trainer.critic.compute_values(make_microbatches(batch, sizes, multiple_of=1))
    ends = batch.cu_seqlens.tolist()
    return torch.cat([found[ends[i] : ends[i + 1]] for i in batch.positions.argsort().tolist()])


def run(workers, paths, run_dir, algorithm, size=1, **sections):
    return workers.run(size, fit, paths, run_dir, algorithm, sections)[0]


def rows(run_dir):
    return jsonl.read(run_dir / "metrics.jsonl")


@pytest.fixture(scope="module")
def stage(workers, paths):
    """(run directory, V before, V after, updates) of a stage that is over."""
    run_dir = paths[1].parent / "stage"
    return run_dir, *run(workers, paths, run_dir, STAGE)


def test_the_critic_alone_learns_and_is_kept(stage):
    run_dir, before, after, updates = stage
    assert updates == STEPS * UPDATES
    found = rows(run_dir)
    assert [row["step"] for row in found] == list(range(STEPS + 1))
    assert not [n for row in found for n in row if n.startswith("actor/") and n != "actor/entropy"]
    explained = [row["critic/explained_variance"] for row in found[1:]]
    assert explained[0] < 0.1 and explained[-1] > 0.5, explained
    (checkpoint,) = run_dir.glob("checkpoints/step_*")
    assert checkpoint.name == f"step_{STEPS:06d}"
    kept = json.loads((checkpoint / "state.json").read_text())
    assert kept["num_updates"] == {"critic": updates}
    assert kept["run"]["explained_variances"] == explained
    assert (run_dir / "report.html").exists()
    assert not (run_dir / "hf_export").exists() and not (checkpoint / "actor").exists()


def test_a_policy_starts_at_once_from_that_critic(workers, paths, stage, tmp_path):
    run_dir, _, after, updates = stage
    start = {"critic_checkpoint": str(run_dir)}
    first, then, count = run(workers, paths, tmp_path / "policy", POLICY, model=start)
    assert torch.equal(first, after)
    assert count == updates + UPDATES
    (_, row) = rows(tmp_path / "policy")
    assert row["critic/explained_variance"] > 0.5 and row["actor/grad_norm"] > 0
    assert row["critic/learning_rate"] == pytest.approx(RATE * (updates + UPDATES) / WARMUP)
    # The stage's own next step: Adam's moments are there.
    shutil.copytree(run_dir, tmp_path / "longer")
    longer = {**STAGE, "value_pretraining_steps": STEPS + 1}
    _, expected, _ = run(workers, paths, tmp_path / "longer", longer)
    torch.testing.assert_close(then, expected, rtol=1e-4, atol=1e-5)
    # A run that resumes has a critic of its own.
    gone = {"critic_checkpoint": str(tmp_path / "gone")}
    again = run(workers, paths, tmp_path / "policy", {**POLICY, "policy_steps": 2}, model=gone)
    assert torch.equal(again[0], then)


@pytest.mark.parametrize("size", [1, 2])
def test_values_may_start_at_the_mean_return(workers, paths, tmp_path, size):
    """A resumed run keeps the constant; all tensor-parallel ranks have it."""
    still = {"critic_learning_rate": 1e-30, "critic_warmup_updates": 0}
    new = {"value_head_init_std": 0.0, "value_head_bias": "mean_return"}
    sections = {"optimizer": still, "model": new}
    before, after, _ = run(workers, paths, tmp_path / "run", STAGE, size, **sections)
    first, *_ = found = rows(tmp_path / "run")[1:]
    assert before.unique().tolist() == [0.0] and len(after.unique()) == 1
    assert float(after[0]) == pytest.approx(first["critic/return_mean"], abs=1e-6)
    assert float(after[0]) != 0 and len(found) == STEPS
    assert [row["critic/value_error_mean"] for row in found] == pytest.approx([0] * STEPS, abs=1e-6)
    longer = {**STAGE, "value_pretraining_steps": STEPS + 1}
    again = run(workers, paths, tmp_path / "run", longer, size, **sections)
    assert torch.equal(again[0], after) and torch.equal(again[1], after)


def notes(paths, run_dir, algorithm, value_head_bias):
    """What a run says whose critic learns nothing; a worker's function."""
    still = {"critic_learning_rate": 1e-30, "critic_warmup_updates": 0}
    tree = {"algorithm": {"mini_batch_size": NUM_RESPONSES, **algorithm}, "optimizer": still}
    tree["model"] = {"value_head_bias": value_head_bias}
    with trainer(settings(paths[0], run_dir, **tree), paths[1]) as made:
        told, made.output.note = [], lambda text: told.append(text)
        made.fit()
    return [text for text in told if "value pretraining ends" in text]


def test_the_end_of_value_pretraining_says_that_values_are_off(workers, paths, tmp_path):
    both = {"value_pretraining_steps": 1, "policy_steps": 2}
    for i, algorithm in enumerate((STAGE, both)):
        (text,) = workers.run(1, notes, paths, tmp_path / f"off_{i}", algorithm, "none")[0]
        assert text.startswith("warning: ") and "too low in the mean" in text
        right = tmp_path / f"right_{i}"
        assert workers.run(1, notes, paths, right, algorithm, "mean_return")[0] == []


def test_weights_alone_in_another_layout(workers, paths, stage, tmp_path):
    """One checkpoint of the run is named, and two ranks share each matrix."""
    run_dir, _, after, _ = stage
    (checkpoint,) = run_dir.glob("checkpoints/step_*")
    start = {"critic_checkpoint": str(checkpoint), "critic_checkpoint_optimizer": False}
    first, then, count = run(workers, paths, tmp_path, POLICY, size=2, model=start)
    torch.testing.assert_close(first, after, rtol=1e-5, atol=1e-6)
    assert count == UPDATES
    assert rows(tmp_path)[1]["critic/learning_rate"] == pytest.approx(RATE * UPDATES / WARMUP)


def test_the_stage_is_over_when_the_critic_has_settled(workers, paths, stage, tmp_path):
    """Nothing more is learned: no step is better than the first; three of them, with patience 2.

    The first two are an earlier run's, which its checkpoint remembers.
    """
    still = {
        "optimizer": {"critic_learning_rate": 1e-30, "critic_warmup_updates": 0},
        "model": {"critic_checkpoint": str(stage[0])},
    }
    run(workers, paths, tmp_path, {**STAGE, "value_pretraining_steps": 2}, **still)
    for _ in range(2):  # The second time it is over already.
        algorithm = {**STAGE, "value_pretraining_steps": 9, "value_pretraining_patience": 2}
        run(workers, paths, tmp_path, algorithm, **still)
        assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2, 3]
        assert (tmp_path / "checkpoints/latest").read_text() == "step_000003"


def test_what_cannot_be_a_start_is_refused_in_a_line(workers, paths, stage, tmp_path):
    run_dir, *_ = stage
    start = {"critic_checkpoint": str(run_dir)}
    with pytest.raises(CheckpointError, match=f"critic_checkpoint={tmp_path} is no complete ch"):
        find_critic(tmp_path)
    (tmp_path / "state.json").write_text(json.dumps({"step": 1, "num_updates": {"actor": 3}}))
    seal(tmp_path)
    with pytest.raises(CheckpointError, match="holds no critic, only actor; set it to a run"):
        find_critic(tmp_path)
    other = write_tiny_hf(tmp_path / "hf", **{**MODEL, "ffn": 64}), paths[1]
    shape = run(workers, other, tmp_path / "shape", POLICY, model=start)
    assert f"step_{STEPS:06d}/critic is of another model" in shape
    assert "expected shape [2, 128, 32], found [2, 96, 32]" in shape
    parallel = {"use_distributed_optimizer": False}
    plain = run(workers, paths, tmp_path / "plain", POLICY, model=start, parallel=parallel)
    assert "use_distributed_optimizer=False" in plain and "critic_checkpoint_optimizer" in plain
    between = {**POLICY, "value_range": [-2, 2]}
    ranged = run(workers, paths, tmp_path / "ranged", between, model=start)
    assert "its critic was trained with algorithm.value_range=null, which" in ranged
    roles = run(workers, paths, run_dir, POLICY)
    assert "holds critic, but this configuration trains actor and critic" in roles
    assert not [message for message in (shape, plain, ranged, roles) if "\n" in message]
