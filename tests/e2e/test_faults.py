"""Whole runs under torchrun, with vLLM and verifiers: signalled, without a rank, without room.

Colocated on two tensor-parallel ranks, with experts, which these share, and without; one step off,
where rank 0 trains and rank 1 samples; and so with groups that go on over several steps. Seeded
moments all over a run are tests/run_faults.sh's. Not exercised: several nodes.
"""

import errno
import os
import re
import signal
import time

import pytest

from tests.e2e.started import Started, last_updates
from tests.e2e.test_run import ON_TWO, RECIPE, SMALL, TINY, base_model, run, tiny_problems, torchrun
from tests.run.checkpoint.test_writer import small_disk
from tests.whole_run import measured
from tests.workers import free_port

pytestmark = pytest.mark.slow


APART = [
    "--config", "examples/configs/one_step_off.yaml", "rollout.num_processes=1",
    "parallel.world_size=1", "parallel.tensor_model_parallel_size=1",
    "parallel.sequence_parallel=false",
]  # fmt: skip
EXPERTS = [
    "parallel.sequence_parallel=true", "parallel.expert_model_parallel_size=2",
    "algorithm.router_replay=r3",
]  # fmt: skip
PLACEMENTS = {
    "colocated": [],
    "experts": EXPERTS,
    "one step off": APART,
    "carried over": [*APART, "rollout.carry_over_groups=2", "rollout.max_lag=2"],
}


@pytest.fixture(scope="module", params=PLACEMENTS)
def placement(request):
    return request.param


@pytest.fixture(scope="module")
def given(placement, tmp_path_factory):
    """A model and problems, as overrides, for four steps with a checkpoint after each."""
    out = tmp_path_factory.mktemp("given")
    model = base_model(out / "base", 30, experts=8 if placement == "experts" else 0)
    more = ["checkpoint.every_steps=1", *PLACEMENTS[placement]]
    return [*SMALL, *ON_TWO, model, *tiny_problems(out), *more]


@pytest.fixture(scope="module")
def whole(given, tmp_path_factory):
    """A run that meets no fault."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    run(torchrun(*command(given, run_dir)))
    return run_dir


def command(given, run_dir, *more):
    """What torchrun starts."""
    where = f"logging.run_dir={run_dir}"
    return ["-m", "vapo_megatron.train", "--config", TINY, *given, where, *more]


def places(said):
    """Where a rank was each time when it was said to be dead or stopped: phase and step."""
    return re.findall(r"error: rank \d+ \(.*?\) in (.+?) is dead or stopped, silent for", said)


def check_as_whole(run_dir, whole, faults):
    """It has ended as if they had never happened."""
    for fault in faults:
        fault.lost_updates = last_updates(whole) - last_updates(run_dir)
    assert measured(run_dir) == measured(whole)
    for fault in faults:
        fault.survived = True


def test_torchrun_starts_a_run_anew_whose_rank_was_killed(
    placement, given, whole, injected, tmp_path
):
    cut = tmp_path / "cut"
    # Not --standalone, whose rendezvous has a new store each time.
    anew = [*torchrun()[:3], "--nproc-per-node=2", f"--master-port={free_port()}"]
    started = Started([*anew, "--max-restarts=2", *command(given, cut)], tmp_path / "log", cut)
    faults = []
    # Apart, once what samples and once what trains.
    for enough, rank in zip((2, 4), (1, 1) if placement in ("colocated", "experts") else (1, 0)):
        started.wait_for(lambda enough=enough: started.rows() >= enough)
        os.kill(started.ranks()[rank], signal.SIGKILL)
        name = f"{placement}: rank {rank} killed, torchrun starts all anew"
        faults.append(injected(name, f"after row {enough - 1}"))
        killed = time.monotonic()
        started.wait_for(lambda: len(places(started.log.read_text())) >= len(faults))
        assert time.monotonic() - killed < 30
        faults[-1].where = places(started.log.read_text())[-1]
    assert started.end() == 0, started.said()
    assert len(places(started.log.read_text())) == len(faults)
    check_as_whole(cut, whole, faults)


def test_a_stopped_rank_ends_all_within_the_limit(placement, given, whole, injected, tmp_path):
    run_dir = tmp_path / "run"
    started = Started(
        torchrun(*command(given, run_dir, "timeouts.silence_seconds=10")), tmp_path / "log", run_dir
    )
    started.wait_for(lambda: started.rows() >= 2)
    os.kill(started.ranks()[1], signal.SIGSTOP)
    stopped = time.monotonic()
    fault = injected(f"{placement}: rank 1 stopped, started again", "after row 1")
    assert started.end() != 0
    # torchrun itself needs 30 s to kill a process that cannot answer.
    assert time.monotonic() - stopped < 60
    # The rank that noticed says so, and at the end torchrun repeats it.
    (fault.where,) = set(places(started.log.read_text()))
    assert re.search(r"loop.py.* in _run\n", (run_dir / "stacks/rank_0000.txt").read_text())
    run(torchrun(*command(given, run_dir)))
    check_as_whole(run_dir, whole, [fault])


def test_a_full_disk_ends_all_and_the_run_goes_on_once_there_is_room(
    placement, given, whole, injected, tmp_path
):
    """The run's directory is a small tmpfs, which takes a mount; elsewhere nothing is shown."""
    disk = tmp_path / "disk"
    disk.mkdir()
    saved = whole.glob("checkpoints/step_*")
    size = max(sum(file.stat().st_size for file in step.rglob("*")) for step in saved)
    told = re.compile(rf"error: {disk}/run/(.+) cannot be written: {os.strerror(errno.ENOSPC)} \(")
    # Two checkpoints fit, with what is written beside them, and the third does not.
    with small_disk(disk, int(2.6 * size)) as cannot_mount:
        if cannot_mount:
            pytest.skip("mounting is not permitted here")
        started = Started(torchrun(*command(given, disk / "run")), tmp_path / "log", disk / "run")
        fault = injected(f"{placement}: the disk is full, started again with room", "unknown")
        assert started.end() != 0
        said = started.log.read_text()
        fault.where, *_ = told.findall(said)
        assert "resumes from" in said
        assert said.count("Traceback") == 1 == said.count("ChildFailedError("), (
            "not torchrun's alone"
        )
        assert last_updates(disk / "run") > 0
        run(["mount", "-o", "remount,size=1g", disk])
        run(torchrun(*command(given, disk / "run")))
        check_as_whole(disk / "run", whole, [fault])


def test_a_recipe_told_to_stop_ends_well_and_goes_on(placement, given, injected, tmp_path):
    """Its torchrun alone is signalled, while it samples, and there is no time for the step.

    The next one is signalled while it starts. Apart, there has to be time for what is sampled: a
    checkpoint needs it.
    """
    run_dir, grace = tmp_path / "run", 0 if placement in ("colocated", "experts") else 25
    more = ["checkpoint.every_steps=0", f"logging.run_dir={run_dir}"]

    def start(grace=0):
        port = {"NPROC_PER_NODE": "2", "MASTER_PORT": str(free_port())}
        given_time = f"checkpoint.grace_seconds={grace}"
        command = ["bash", RECIPE, "--config", TINY, *given, *more, given_time]
        return Started(command, tmp_path / "log", run_dir, **port)

    started = start(grace)
    started.wait_for(lambda: started.rows() >= 3)
    os.kill(started.launcher.pid, signal.SIGTERM)
    name = f"{placement}: torchrun sent SIGTERM, grace of {grace} s, started again"
    fault = injected(name, "after row 2")
    assert started.end() == 0, started.said()
    done = started.rows() - 1
    assert f"stopped by SIGTERM after step {done}; start it again" in started.said()
    latest = (run_dir / "checkpoints/latest").read_text()
    assert done in (2, 3) and latest == f"step_{done:06d}", "saved, though none was due"

    started = start()
    started.wait_for(lambda: len(started.ranks()) == 2)
    os.kill(started.launcher.pid, signal.SIGTERM)
    name = f"{placement}: torchrun sent SIGTERM, no grace, started again"
    at_start = injected(name, "start")
    assert started.end() == 0, started.said()
    assert f"stopped by SIGTERM after step {done}; start it again" in started.said()
    assert started.rows() == done + 1 and (run_dir / "checkpoints/latest").read_text() == latest

    started = start()
    assert started.end() == 0, started.said()
    assert [row["step"] for row in measured(run_dir)] == [0, 1, 2, 3, 4]
    # Two updates a step: four steps of the critic, three of the actor.
    for each in (fault, at_start):
        each.lost_updates = 14 - last_updates(run_dir)
        each.survived = each.lost_updates == 0
