"""Who is on the device in each phase of a step, and where a step that lacks time ends.

A whole trainer on two data-parallel ranks, by turns. What a turn moves is in
tests/roles/test_device_schedule.py, when there is time in tests/parallel/health/test_early_stop.py.
Not exercised: a GPU's memory.
"""

import functools

import pytest
import torch.distributed as dist

from tests.dumped import MODEL, config, dump
from tests.roles.test_device_schedule import there
from tests.weights.tiny_hf import write_tiny_hf
from tests.whole_run import settings, trainer
from vapo_megatron.errors import Stopped

CALLS = (
    ("critic", "compute_values"), ("actor", "compute_logprobs"),
    ("reference", "compute_logprobs"), ("critic", "update"), ("actor", "update"),
)  # fmt: skip


def watched(trainer):
    """A list that grows with each call: (role, function, what of each role is on the device)."""
    seen = []
    models = {
        "actor": trainer.actor,
        "critic": trainer.critic,
        "reference": trainer.reference,
    }

    def watch(role, name):
        part = getattr(trainer, role)
        function = getattr(part, name)

        def called(*arguments):
            seen.append((role, name, {r: there(model) for r, model in models.items()}))
            return function(*arguments)

        setattr(part, name, called)

    for role, name in CALLS:
        watch(role, name)
    return seen


def steps(hf, dumped, run_dir):
    """What was called in a step that the second rank has no time for, and in the same with time."""
    rank = dist.get_rank()
    given = settings(
        hf,
        run_dir,
        parallel={"world_size": 2, "offload": True},
        algorithm={"policy_steps": 1, "kl_coef": 0.1},
    )
    with trainer(given, dumped) as made:
        seen = watched(made)
        has_time = made.early_stop.has_time_to_finish
        made.early_stop.has_time_to_finish = lambda: rank == 0
        with pytest.raises(Stopped):
            made.train_step(0)
        stopped = list(seen), made.policy_version
        made.early_stop.has_time_to_finish = has_time
        seen.clear()
        made.train_step(0)
        return *stopped, seen, made.policy_version


def test_a_step_by_turns_and_one_that_lacks_time(workers, tmp_path):
    hf = write_tiny_hf(tmp_path / "hf", **MODEL)
    workers.run(2, dump, tmp_path / "replay", [1], 2)
    expected = []
    for role, name in CALLS:
        held = dict.fromkeys(("actor", "critic", "reference"), "nothing")
        held[role] = "training" if name == "update" else "parameters"
        expected.append((role, name, held))
    ranks = workers.run(2, steps, hf, tmp_path, tmp_path / "run")
    for without_time, version, whole, after in ranks:
        assert without_time == expected[:3] and version == 0, "no update was begun"
        assert whole == expected and after == 1


def kept(run_dir):
    """The lines that tell of a step's skipped updates; a worker's function."""
    from tests.dumped import rollouts
    from vapo_megatron.rollout.source import RolloutSource
    from vapo_megatron.run.skipped import kept_if_skipped

    algorithm, notes = config(run_dir).algorithm, []
    dump = functools.partial(RolloutSource.dump, None, scored=rollouts(), algorithm=algorithm)
    for step, metrics in enumerate(({"critic": 2.0, "actor": 1.0}, {"critic": 1.0}, {}), 1):
        with kept_if_skipped(run_dir, step, dump, notes.append) as learned:
            learned |= {f"{role}/skipped_updates": count for role, count in metrics.items()}
    return notes


def test_a_line_tells_whose_updates_were_skipped(workers, tmp_path):
    ((both, critic),) = workers.run(1, kept, tmp_path)
    assert both.startswith("step 1: updates skipped, 2 of the critic and 1 of the actor: not fin")
    assert critic.startswith("step 2: updates skipped, 1 of the critic: not finite; its responses")
