"""The miniatures' runner: jobs side by side, with stand-ins for the training; tables and curves.

Not exercised: the training's own processes, which tests/examples/test_ablation.py's slow test has;
it shows that a fork trains what a process of its own does, too.
"""

import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree

import psutil
import pytest

from tests.examples.tiny import ROOT
from vapo_megatron.errors import DataError, UserError

# isort: split
from runner import curves, tables
from runner.forked import can_fork
from runner.jobs import Job, changed, digest, finished, is_finished, require_unchanged
from runner.schedule import locked, run_jobs

SPEND = "import sys, time, pathlib as p; d = p.Path(sys.argv[1]); d.mkdir(exist_ok=True); "


def stand_in(root, name: str, code: str = "", needs: tuple[str, ...] = (), **more) -> Job:
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


def run(root, jobs: list[Job]) -> tuple[dict[str, str], list[str]]:
    said: list[str] = []
    with locked(root) as lock:
        failures = run_jobs(
            jobs, slots=2, lock=lock, environment=os.environ, cwd=root, say=said.append
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
    for moment, _ in spans.values():
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
    names = ("other", "base")
    assert finished(jobs, names) == {"other": {0: jobs[3]}}
    assert finished(jobs, names, "form/") == {}
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


HEAVY = """
import os
with open("imported.txt", "a") as file:
    print(os.getpid(), os.environ["THREADS"], file=file)
os.environ["SET_ON_IMPORT"] = "1"
"""

TRAINER = """
import heavy, json, os, pathlib, signal, subprocess, sys, time
out, does = pathlib.Path(sys.argv[1]), sys.argv[2]
out.mkdir(exist_ok=True)
print("argv", json.dumps(sys.argv[1:]), "in", os.getcwd())
known = {
    "session": os.getsid(0) == os.getpid(),
    "variables": [os.environ.get(name) for name in ("THREADS", "SET_ON_IMPORT")],
    "handlers": [signal.getsignal(n) is signal.default_int_handler for n in (2, 15)],
    "main": sys.modules["__main__"].__dict__ is globals(),
}
(out / "known.json").write_text(json.dumps(known))
if does == "fails":
    sys.exit("no disk")
if does == "sleeps":
    subprocess.Popen(["sleep", "987"]).wait()
(out / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\\n")
"""

DRIVER = """
import os, sys
from pathlib import Path
sys.path[:0] = [{root!r}, {root!r} + "/examples/tiny", {here!r}]
from runner import command, forked, jobs
forked.LIBRARIES = ("heavy",)
os.environ["THREADS"] = "1"
here = Path({here!r})
def job(i, does):
    out = here / "runs" / f"run_{{i}}"
    script, steps = (["-c", does], 0) if " " in does else ([str(here / "trainer.py")], 1)
    start = (sys.executable, *script, str(out), does)
    return jobs.Job(out.name, out, start, {{}}, num_steps=steps)
def plan(args):
    print("buffered")
    todo = [job(i, does) for i, does in enumerate({does!r})]
    return command.Plan(here / "runs", todo, lambda: (here / "table.md").write_text("written"))
command.ROOT = here / "cwd"
sys.exit(command.main("driver", command.options("driver", "", ""), plan, []))
"""


@pytest.fixture
def start(tmp_path):
    """Start an invocation with runs that do as they are told: fails, sleeps, trains, or a script.

    All but the scripts are forked.
    """
    (tmp_path / "heavy.py").write_text(HEAVY)
    (tmp_path / "trainer.py").write_text(TRAINER)
    (tmp_path / "cwd").mkdir()
    started = []

    def begin(*does: str) -> subprocess.Popen:
        code = DRIVER.format(root=str(ROOT), here=str(tmp_path), does=does)
        # It would hide what waits in a buffer.
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
        process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, env=environment,
        )  # fmt: skip
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()


def processes_of(process: subprocess.Popen, count: int) -> list[psutil.Process]:
    """Wait until an invocation has so many processes, and return them."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        found = psutil.Process(process.pid).children(recursive=True)
        if len(found) == count:
            # Seconds are kept to .1, and less than half of that may have passed.
            time.sleep(0.2)
            return found
        time.sleep(0.05)
    raise AssertionError("the runs' own processes did not come")


def test_libraries_are_imported_once_and_all_else_is_as_for_a_process(start, tmp_path):
    process = start("trains", "trains", "fails")
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert (tmp_path / "imported.txt").read_text() == f"{process.pid} 1\n"
    for i in range(3):
        found = json.loads((tmp_path / f"runs/run_{i}/known.json").read_text())
        assert found == {
            "session": True, "variables": ["1", "1"], "handlers": [True, False], "main": True,
        }  # fmt: skip
    log = (tmp_path / "runs/run_0.log").read_text()
    assert log == f'argv ["{tmp_path}/runs/run_0", "trains"] in {tmp_path}/cwd\n'
    assert (tmp_path / "runs/run_2.log").read_text().endswith("no disk\n")
    assert f"run_2: exit code 1 at step 0/1, see {tmp_path}/runs/run_2.log" in text
    assert text.count("buffered") == 1 and text.count("importing torch") == 1


DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(987)"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_no_process_and_writes_what_is_finished(start, tmp_path, number):
    """One of the two runs is a fork with a process of its own, and one ignores SIGTERM."""
    process = start("sleeps", DEAF)
    children = processes_of(process, 3)
    process.send_signal(number)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "driver: interrupted; run the same command to resume\n" in text
    assert "Traceback" not in text
    assert not psutil.wait_procs(children, timeout=10)[1]
    assert (tmp_path / "runs/run_0.log").read_text().startswith("argv "), "no line is lost"
    for i in (0, 1):
        state = json.loads((tmp_path / f"runs/run_{i}.job.json").read_text())
        assert not state["finished"] and state["seconds"] > 0
    assert (tmp_path / "table.md").read_text() == "written"


def test_one_invocation_at_a_time_and_none_beside_forks_that_outlive_one(start, tmp_path):
    process = start("sleeps", "sleeps")
    children = processes_of(process, 4)
    process.kill()
    process.wait()
    with pytest.raises(DataError, match="in use by another invocation or processes left by one"):
        with locked(tmp_path / "runs"):
            pass
    for child in children:
        child.kill()
    psutil.wait_procs(children, timeout=10)
    with locked(tmp_path / "runs"):
        pass


def test_what_starts_its_own_processes_is_not_forked():
    assert can_fork((sys.executable, "/x/train.py", "--config", "y"))
    assert can_fork((sys.executable, "-m", "vapo_megatron.train", "--config", "y"))
    # Starts torchrun.
    assert not can_fork((sys.executable, "-m", "vapo_megatron", "train"))
    assert not can_fork((sys.executable, "-c", "pass"))
    assert not can_fork(("bash", "x.py"))


def test_a_table_by_hand():
    runs = {
        "vapo": {0: 0.9, 2: 0.92, 10: 0.94},
        "low": {2: 0.2, 0: 0.1},
        "near": {0: 0.91},
        "odd": {0: 0.5, 2: None},
        "new": {3: 0.5},
    }

    def itself(number):
        return number

    columns = {
        "mean": tables.mean(itself),
        "each": tables.each(itself),
        "less": tables.difference(itself, ".2f"),
        "compared": tables.compared(itself, ".1f"),
        "listed": tables.listed(itself, ".1f"),
    }
    titles = {**{name: name.upper() for name in runs}, "none": "NONE"}
    lines = tables.of_arms("arm", titles, columns, runs).splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert rows[0] == ["arm", *columns] and lines[1] == "|" + "---|" * 6
    # mean (.9 + .92 + .94) / 3, deviations -.02, 0, .02: sqrt(8e-4 / 2) = .02
    each = ["0.900 0.920 - 0.940", "", "0.9 +- 0.0", "0.9 +- 0.0 (0.9 0.9 - 0.9)"]
    assert rows[2] == ["VAPO", "0.920 +- 0.020", *each]
    # .1 and .2: deviations .05, sqrt(5e-3 / 1) = .071. .1 - .9 and .2 - .92: deviations .04, .057.
    assert rows[3][1:4] == ["0.150 +- 0.071", "0.100 0.200 - -", "-0.76 +- 0.06, below in 2 of 2"]
    assert rows[3][4] == "0.2 +- 0.1 (-0.8 +- 0.1, below in 2 of 2)"
    assert rows[4][1:4] == ["0.910", "0.910 - - -", "+0.01, below in 0 of 1"]
    assert rows[5][1:4] == ["0.500", "0.500 never - -", "-0.40, below in 1 of 1"]
    # Of no seed that the first arm has: nothing to compare.
    assert rows[6][1:] == ["0.500", "- - 0.500 -", "-", "0.5", "0.5 (- - 0.5 -)"]
    assert rows[7] == ["NONE", "-", "-", "-", "-", "- (-)"]


def test_a_curve_between_and_beyond_its_points():
    curve = [(0, 0.2), (10, 0.6), (20, 0.5), (30, 1.0)]
    assert curves.at(curve, 5) == pytest.approx(0.4)
    assert curves.at(curve, 20) == 0.5 and curves.at(curve, 30) == 1.0
    assert curves.at(curve, 31) is None and curves.at(curve, -1) is None
    # .5 is three quarters of the way to .6; .9 four fifths of the way from .5 to 1.
    assert curves.reached(curve, 0.5) == pytest.approx(7.5)
    assert curves.reached(curve, 0.9) == pytest.approx(28)
    assert curves.reached(curve, 0.1) == 0 and curves.reached(curve[:3], 0.9) is None


def test_a_band_is_drawn_where_all_curves_are():
    of_seeds = [[(0, 0.0), (10, 1.0)], [(0, 0.2), (5, 0.5)]]
    # At 5 the first is .5 and the second .5; at 10 the second is over.
    found = curves.mean_and_band(of_seeds)
    assert [point[0] for point in found] == [0, 5]
    assert found[0][1:] == pytest.approx((0.1, 0.1 - 0.2 / 2**0.5, 0.1 + 0.2 / 2**0.5))
    line = curves.Line("a", "#000", of_seeds)
    drawn = curves.draw([curves.Panel("title", "x", [line])])
    ElementTree.fromstring(drawn)
    assert drawn.count("<polyline") == drawn.count("<polygon") == 1


def test_tables_become_a_page():
    html = tables.html_table("| a | b |\n|---|---|\n| 1 | <2> |\n\nnote\n")
    assert html == (
        "<table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td>&lt;2&gt;</td></tr></table>"
        '<p class="note">note</p>'
    )
    assert "<h2>one</h2>" in tables.page("title", [("one", html)])
