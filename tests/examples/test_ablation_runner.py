"""The miniatures' runner, with stand-ins for the training.

Not exercised: the training's own processes, which tests/examples/test_ablation.py's slow test has.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples" / "tiny"))

from runner.jobs import Job, changed, digest, is_finished, require_unchanged  # noqa: E402
from runner.schedule import locked, run_jobs  # noqa: E402

from tests.examples.test_ablation import leave  # noqa: E402
from vapo_megatron.errors import DataError, UserError  # noqa: E402

SPEND = "import sys, time, pathlib as p; d = p.Path(sys.argv[1]); d.mkdir(exist_ok=True); "


def stand_in(root: Path, name: str, code: str = "", needs: tuple[str, ...] = (), **more) -> Job:
    """A job that notes when it began and ended in its directory, with `code` in between."""
    out = root / "seed_0" / name
    script = (
        SPEND + "begin = time.monotonic(); " + (code or "time.sleep(0.3)") + "\n"
        "with (d / 'times').open('a') as f: f.write(f'{begin} {time.monotonic()}\\n')"
    )
    needs = tuple(f"seed_0/{need}" for need in needs)
    command = (sys.executable, "-c", script, str(out))
    return Job(f"seed_0/{name}", out, command, more.pop("settings", {"x": 1}), needs, **more)


def times(job: Job) -> list[tuple[float, float]]:
    """(begin, end) of each time that a stand-in ran to its end."""
    lines = (job.out / "times").read_text().splitlines()
    return [tuple(map(float, line.split())) for line in lines]


def run(root: Path, jobs: list[Job], slots: int = 2) -> tuple[dict[str, str], list[str]]:
    said: list[str] = []
    with locked(root) as lock:
        failures = run_jobs(
            jobs, slots=slots, lock=lock, environment=os.environ, cwd=root, say=said.append
        )
    return failures, said


def test_jobs_run_when_what_they_need_is_there_and_two_at_a_time(tmp_path):
    # The first two arms end when both have begun.
    meet = "\nwhile not (d.parent / '{}').exists(): time.sleep(0.01)"
    jobs = [
        stand_in(tmp_path, "base"),
        stand_in(tmp_path, "value", needs=("base",)),
        stand_in(tmp_path, "arm_0", meet.format("arm_1"), needs=("value",)),
        stand_in(tmp_path, "arm_1", meet.format("arm_0"), needs=("value",)),
        stand_in(tmp_path, "arm_2", needs=("value",)),
    ]
    failures, said = run(tmp_path, jobs)
    assert not failures
    spans = {job.out.name: times(job)[0] for job in jobs}
    assert spans["base"][1] <= spans["value"][0]
    assert all(spans["value"][1] <= spans[f"arm_{i}"][0] for i in range(3))
    begins = sorted(begin for begin, _ in spans.values())
    for moment in begins:
        assert sum(begin <= moment < end for begin, end in spans.values()) <= 2
    assert len(said) == 5 and "5 of 5 done" in said[-1]

    failures, said = run(tmp_path, jobs)
    assert not failures and said == ["5 of 5 already finished"]
    assert all(len(times(job)) == 1 for job in jobs), "what is finished is not run again"


def test_a_failure_stops_what_needs_it_and_nothing_else(tmp_path):
    jobs = [
        stand_in(tmp_path, "base", code="sys.exit('no disk')"),
        stand_in(tmp_path, "value", needs=("base",)),
        stand_in(tmp_path, "arm", needs=("value",)),
        stand_in(tmp_path, "other"),
    ]
    failures, said = run(tmp_path, jobs)
    assert set(failures) == {"seed_0/base", "seed_0/value", "seed_0/arm"}
    assert failures["seed_0/base"] == f"exit code 1, see {jobs[0].log}"
    assert failures["seed_0/arm"] == "not run, because seed_0/value failed"
    assert "no disk" in jobs[0].log.read_text()
    assert is_finished(jobs[3]) and not is_finished(jobs[0])
    # What failed is tried again, with what waited for it.
    mended = [stand_in(tmp_path, "base"), *jobs[1:]]
    failures, _ = run(tmp_path, mended)
    assert not failures and len(times(jobs[3])) == 1 and len(times(jobs[2])) == 1


def test_a_run_that_stops_before_its_last_step_is_not_finished(tmp_path):
    rows = "(d / 'metrics.jsonl').write_text('{\"step\": %d}\\n')"
    failures, _ = run(tmp_path, [stand_in(tmp_path, "arm", rows % 3, num_steps=4)])
    assert failures["seed_0/arm"].startswith("exit code 0 at step 3/4")
    failures, _ = run(tmp_path, [stand_in(tmp_path, "arm", rows % 4, num_steps=4)])
    assert not failures


def test_changed_settings_are_refused_or_run_again(tmp_path):
    fields = {"algorithm.gamma": 1.0, "seed": 3}
    kept = stand_in(tmp_path, "kept", settings=fields)
    before = stand_in(tmp_path, "arm", settings=fields)
    run(tmp_path, [kept, before])
    now = stand_in(tmp_path, "arm", settings={**fields, "algorithm.gamma": 0.9})
    # A field that there was not before is no difference as long as it has its default.
    later = {**fields, "algorithm.clip_low": 0.2}
    assert not changed(stand_in(tmp_path, "arm", settings=later))
    assert changed(stand_in(tmp_path, "arm", settings={**later, "algorithm.clip_low": 0.3}))
    # Nor for what is made from it.
    assert digest(fields) == digest(later) != digest({**later, "algorithm.clip_low": 0.3})
    with pytest.raises(
        UserError, match=r"arm was made .*: algorithm.gamma is 0.9, was 1\.0; redo .*--rerun"
    ):
        require_unchanged([kept, now], rerun=False)
    assert is_finished(before)
    require_unchanged([kept, now], rerun=True)
    assert is_finished(kept) and not now.out.exists() and not is_finished(now)


def test_one_invocation_at_a_time(tmp_path):
    with locked(tmp_path), pytest.raises(DataError, match="in use by another invocation"):
        with locked(tmp_path):
            pass
    with locked(tmp_path):
        pass


def test_a_signal_while_a_job_starts_leaves_no_process(tmp_path, monkeypatch):
    began = []

    class Interrupted(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            began.append(self.pid)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, [stand_in(tmp_path, "a", "time.sleep(987)")])
    assert len(began) == 1 and not psutil.pid_exists(began[0])
    assert signal.getsignal(signal.SIGINT) == handler


DRIVER = """
import sys
sys.path[:0] = [{root!r}, {root!r} + "/examples/tiny"]
from ablation import main as ablation
from tests.examples.test_ablation_runner import stand_in
ablation.seed_jobs = lambda root, *_: [
    stand_in(root, "a", "import subprocess; subprocess.Popen(['sleep', '987']).wait()"),
    stand_in(root, "b", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
             "time.sleep(987)"),
]
sys.exit(ablation.main(["--seeds", "1", "--out", {out!r}]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_no_process(tmp_path, number):
    driver = DRIVER.format(root=str(ROOT), out=str(tmp_path / "out"))
    leave(tmp_path / "out", 0, "vapo")
    process = subprocess.Popen(
        [sys.executable, "-c", driver], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    started = psutil.Process(process.pid)
    deadline = time.monotonic() + 60
    while len(started.children(recursive=True)) < 3:
        assert process.poll() is None and time.monotonic() < deadline, "no three processes came"
        time.sleep(0.05)
    # Seconds are kept to .1, and less than half of that may have passed.
    time.sleep(0.2)
    children = started.children(recursive=True)
    process.send_signal(number)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 130
    assert text == "ablation: interrupted; run the same command to resume\n"
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    state = json.loads((tmp_path / "out/seed_0/a.job.json").read_text())
    assert not state["finished"] and state["seconds"] > 0
    assert "| VAPO (vapo) | 0.500 |" in (tmp_path / "out/table.md").read_text()
