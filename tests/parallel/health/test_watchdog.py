"""Real processes, one of which dies, stops, hangs or fails in a phase: what each rank reports.

Not exercised: vLLM, verifier processes and torchrun (tests/e2e/test_faults.py has them), a machine
that disappears, a GPU.
"""

import re
import subprocess
import sys
import time
from argparse import Namespace

import psutil
import pytest
from torch.distributed.flight_recorder.components.loader import read_dir

from tests import faults
from tests.dumped import MODEL, dump
from tests.launched import Launched
from tests.weights.tiny_hf import write_tiny_hf

# (fault, phase, step, rank), limits that differ, exit codes, and what the others report. A rank
# that holds the GIL exits by faulthandler's timer: if rank 0 started late, on a busy machine, the
# closed connection may precede rank 0's verdict.
CASES = {
    "killed": (
        ("killed", "critic_update", 2, 1),
        {},
        [1, -9],
        r"rank 1 \(.*, process \d+\) in critic_update of step 2 is dead or stopped, silent for \d+ "
        r"s\. Then rank 0 \(.*\) in critic_update of step 2: RuntimeError: .*; stacks: ",
    ),
    "stopped": (
        ("stopped", "generation", 2, 1), {"generation_seconds": 4}, [1, None],
        r"rank 1 \(.*\) in generation of step 2 is dead or stopped, silent for \d+ s; stacks: ",
    ),
    "hangs": (
        ("hangs", "exchange", 1, 0),
        {"other_seconds": 4},
        [1, 1],
        r"rank 0 \(.*\) in exchange of step 1 has made no progress for \d+ s, longer than "
        r"timeouts\.other_seconds=4; stacks: ",
    ),
    "hangs unseen": (
        ("hangs unseen", "exchange", 1, 0),
        {"other_seconds": 4},
        [1, 1],
        r"step 1 has made no progress for \d+ s, longer than timeouts\.other_seconds=4, and NCCL "
        r"does not say who waits for whom: "
        r"rank 0 \(.*\) in exchange at .*/tests/faults\.py:\d+ \(<lambda>\); "
        r"rank 1 \(.*\) in exchange at torch/distributed/\S+:\d+ \(all_reduce\); stacks: ",
    ),
    "hangs on a full disk": (
        ("hangs", "exchange", 1, 0), {"other_seconds": 4}, [1, 1],
        r"rank 0 \(.*\) in exchange of step 1 has made no progress for \d+ s, ",
    ),
    "holds the GIL": (
        ("holds the GIL", "exchange", 1, 1),
        {"silence_seconds": 6},
        [1, 1],
        r"rank 1 \(.*\) in exchange of step 1 is dead or stopped, silent for \d+ s"
        r"(\. Then rank 0 .*)?; stacks: ",
    ),
    "holds the GIL at once": (
        ("holds the GIL at once", "generation", 1, 1),
        {"silence_seconds": 6},
        [1, 1],
        r"rank 1 \(.*\) in generation of step 1 is dead or stopped, silent for \d+ s"
        r"(\. Then rank 0 .*)?; stacks: ",
    ),
    "fails": (
        ("fails", "critic_update", 3, 1), {}, [1, 1],
        r"rank 1 \(.*\) in critic_update of step 3: RuntimeError: boom \\udcff; stacks: ",
    ),
    "fails in a beat": (
        ("fails in a beat", "critic_update", 3, 1), {}, [1, 1],
        r"rank 1 \(.*\) in critic_update of step 3: RuntimeError: boom in a beat; stacks: ",
    ),
    "has no room": (
        ("has no room", "exchange", 2, 1),
        {},
        [2, 2],
        r"error: .*/problems\.jsonl cannot be written: No space left on device \(.* GB are free\); "
        r"free some space and restart: a run resumes from its latest checkpoint$",
    ),
    "the store stops": (
        ("stopped", "exchange", 1, 0), {"silence_seconds": 6, "start_seconds": 20}, [None, 1],
        r"rank 0, or torchrun on the first node, does not answer any more; this is rank 1 ",
    ),
}  # fmt: skip


# Not faults.
WELL = {
    "whole": (None, {}),
    "rank 0 comes late": (("comes late", "start", 0, 0), {"silence_seconds": 6}),
    "rank 1 comes late": (("comes late", "start", 0, 1), {"silence_seconds": 6}),
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """All of them at once, because they mostly wait."""
    out = tmp_path_factory.mktemp("jobs")
    for case in (*CASES, *WELL):
        (out / case).mkdir()
    (out / "hangs on a full disk/stacks").mkdir()
    (out / "hangs on a full disk/stacks/rank_0000.txt").symlink_to("/dev/full")
    started = {
        case: Launched(faults.run_phases, out / case, limits, fault, world_size=2)
        for case, (fault, limits, *_) in {**CASES, **WELL}.items()
    }
    yield out, started
    for job in started.values():
        job.kill()


@pytest.mark.parametrize("case", CASES)
def test_one_rank_ends_all(case, jobs):
    out, started = jobs
    _, _, expected, words = CASES[case]
    rank = CASES[case][0][3]
    codes, done = started[case].ended([r for r in (0, 1) if expected[r] is None])
    assert codes == expected, done.stderr
    assert re.search(words, done.stderr, re.MULTILINE), done.stderr
    stacks = out / case / "stacks"
    if case == "has no room":
        assert not stacks.exists(), "a mistake is told in a line"
        return
    other = (stacks / f"rank_{1 - rank:04d}.txt").read_text()
    assert re.search(words.partition(";")[0], other)
    assert "train_step" in other and "all_reduce" in other and "in _heartbeat_loop" in other
    if case in ("hangs", "hangs unseen", "holds the GIL", "fails"):
        own = (stacks / f"rank_{rank:04d}.txt").read_text()
        assert "in <lambda>" in own, f"not where it hangs, or failed: {own}"


def test_the_flight_recorder_shows_who_has_not_called_a_collective(jobs):
    """Rank 0 hangs before a sum in which rank 1 waits; torch's own reader finds both files."""
    out, started = jobs
    _, done = started["hangs"].ended()
    place = out / "hangs/stacks/collectives"
    assert f"collectives: torchfrtrace {place}" in done.stderr
    dumps, _ = read_dir(Namespace(trace_dir=str(place), prefix=None))
    assert sorted(dumps) == ["rank_0", "rank_1"]
    calls = [[e["collective_seq_id"] for e in dumps[f"rank_{r}"]["entries"]] for r in (0, 1)]
    assert calls[1] == [*calls[0], calls[0][-1] + 1]
    waits = dumps["rank_1"]["entries"][-1]
    assert not waits["retired"] and "train_step" in {frame["name"] for frame in waits["frames"]}


@pytest.mark.parametrize("case", WELL)
def test_a_job_without_faults_ends_quietly(case, jobs):
    out, started = jobs
    codes, done = started[case].ended()
    assert codes == [0, 0] and "error" not in done.stderr, done.stderr
    assert not (out / case / "stacks").exists()


def test_what_a_process_has_started_ends_with_it():
    """Kills a child whose name is not UTF-8, and its child in another session.

    Exits, too, when end_children raises.
    """
    program = (
        "import subprocess, sys, time;"
        "open('/proc/self/comm', 'wb', 0).write(b'caf\\xe9');"
        "sleeps = [sys.executable, '-c', 'import time; time.sleep(60)'];"
        "child = subprocess.Popen(sleeps, start_new_session=True);"
        "print(child.pid, flush=True); time.sleep(60)"
    )
    parent = (
        f"import subprocess, sys; from vapo_megatron.parallel.health import processes as tree;"
        f"child = subprocess.Popen([sys.executable, '-c', {program!r}], stdout=subprocess.PIPE);"
        "print(child.pid, child.stdout.readline().decode(), flush=True);"
        "tree.end_children(); child.wait(); tree.end_children = None; tree.end_now(3)"
    )
    command = [sys.executable, "-c", parent]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert done.returncode == 3, done.stderr
    child, grandchild = map(int, done.stdout.split())
    for process in (child, grandchild):
        assert has_ended(process)


def has_ended(process):
    """Has it ended within some seconds? An orphan may stay a zombie for a while."""
    for _ in range(100):
        try:
            if psutil.Process(process).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
def test_a_run_whose_rank_is_killed_ends(workers, tmp_path):
    hf, run_dir = write_tiny_hf(tmp_path / "model", **MODEL), tmp_path / "run"
    workers.run(2, dump, tmp_path / "replay", [1, 2, 3], 2)
    fault = ("killed", "actor_update", 2, 1)
    launched = Launched(faults.train, hf, tmp_path / "replay", run_dir, {}, fault, world_size=2)
    codes, done = launched.ended()
    assert codes == [1, -9], done.stderr
    assert re.search(r"rank 1 \(.*\) in actor_update of step 2 is dead or stopped", done.stderr)
    assert "train_step" in (run_dir / "stacks/rank_0000.txt").read_text()
