"""The progress display: what it says, the time left, and that other output does not tear it.

The live display runs in a process of its own on a pseudo-terminal. Not exercised: several processes
at once on one terminal, and terminals that understand no escape sequences.
"""

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from vapo_megatron.run.progress import Progress
from vapo_megatron.run.progress_view import RunState, format_seconds

ROOT = Path(__file__).resolve().parents[2]
ROW = {
    "reward/mean": -0.4123,
    "rollout/response_length_mean": 96.33,
    "actor/entropy": 0.4121,
    "critic/explained_variance": 0.8312,
    "tokens_per_second": 4812.4,
    "time/step_seconds": 3.1,
}


class Clock:
    """Seconds that move when told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def finish(state, clock, step, seconds, **metrics):
    clock.now += seconds
    state.finish_step(step, {"time/step_seconds": seconds, **metrics})


def test_a_plain_line_per_step(capsys):
    with Progress("plain", 34, 14) as progress:
        progress.phase("generation", 3, 8)
        progress.step(0, {"evaluation/avg@8": 0.142, "time/evaluation_seconds": 2.0})
        progress.step(1, {name: v for name, v in ROW.items() if name != "actor/entropy"})
        progress.note("checkpoint saved")
        progress.step(34, {**ROW, "evaluation/avg@8": 0.93})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step  0/34  before training    accuracy 0.142"
    # 33 steps of 3.1 s and an evaluation of 2 s, 104.3 s, which policy steps can only lengthen.
    assert lines[1] == (
        "step  1/34  value pretraining  reward -0.412  length 96.3  explained variance 0.831"
        "  tokens/s 4,812  time per step 3.1 s  > 1 m 44 s left"
    )
    assert lines[2] == "checkpoint saved"
    assert lines[3] == (
        "step 34/34  policy             reward -0.412  length 96.3  entropy 0.412"
        "  explained variance 0.831  tokens/s 4,812  time per step 3.1 s  accuracy 0.930"
    )


def test_auto_is_plain_without_a_terminal(capsys):
    with Progress("auto", 2, 0) as progress:
        progress.step(1, ROW)
    out = capsys.readouterr().out
    assert out.startswith("step 1/2  policy") and "\x1b" not in out


@pytest.mark.parametrize(("mode", "is_leader"), [("off", True), ("plain", False), ("live", False)])
def test_off_and_other_ranks_show_nothing(capfd, mode, is_leader):
    with Progress(mode, 2, 0, is_leader=is_leader) as progress:
        progress.phase("generation", 1, 2)
        progress.step(1, ROW)
        progress.note("note")
        progress.close()
    assert capfd.readouterr() == ("", "")


def test_missing_and_null_figures_are_left_out(capsys):
    with Progress("plain", 1, 0) as progress:
        progress.step(1, {"reward/mean": None})
    assert capsys.readouterr().out == "step 1/1  policy           \n"


def test_time_left_tells_the_two_kinds_of_step_apart():
    clock = Clock()
    state = RunState(10, 4, clock=clock)
    assert state.seconds_left() is None
    finish(state, clock, 1, 9.0)
    # The first step alone: 9 more of 9 s, and the policy's may take longer.
    assert state.seconds_left() == (81.0, True)
    finish(state, clock, 2, 2.0)
    finish(state, clock, 3, 4.0)
    # The first has warmed up and counts no more: (2 + 4) / 2 = 3 for 1 + 6 steps.
    assert state.seconds_left() == (21.0, True)
    finish(state, clock, 4, 3.0)
    finish(state, clock, 5, 20.0)
    # 5 policy steps of 20 s.
    assert state.seconds_left() == (100.0, False)
    clock.now += 8.0
    assert state.seconds_left() == (92.0, False)
    clock.now += 100.0
    # A step that takes longer than expected leaves the 4 after it.
    assert state.seconds_left() == (80.0, False)
    for step in range(6, 11):
        finish(state, clock, step, 10.0)
    assert state.seconds_left() == (0.0, False)


def test_time_left_takes_recent_steps_and_one_evaluation():
    clock = Clock()
    state = RunState(40, 0, clock=clock)
    state.finish_step(0, {"time/evaluation_seconds": 5.0, "time/step_seconds": 5.0})
    for step in range(1, 31):
        finish(state, clock, step, 50.0 if step <= 21 else 2.0)
    # Steps 23 to 30: 10 x 2 s, and the evaluation after the last.
    assert state.seconds_left() == (25.0, False)
    both = {"time/evaluation_seconds": 6.0, "time/step_seconds": 8.0}
    state.finish_step(31, both)
    # 8 s of which 6 were the evaluation: still 2 s a step.
    assert state.seconds_left() == (9 * 2.0 + 6.0, False)


def test_after_a_resume_the_first_step_is_not_one():
    clock = Clock()
    state = RunState(10, 4, first_step=8, clock=clock)
    finish(state, clock, 8, 5.0)
    assert state.seconds_left() == (10.0, False)


def test_durations_as_people_read_them():
    cases = {0.421: "0.42 s", 12.34: "12.3 s", 59.97: "1 m 00 s", 245: "4 m 05 s",
             3599.6: "1 h 00 m", 11520: "3 h 12 m", 187200: "2 d 04 h"}  # fmt: skip
    assert {seconds: format_seconds(seconds) for seconds in cases} == cases


def panel(width, state):
    console = Console(record=True, force_terminal=True, width=width, file=io.StringIO())
    console.print(state)
    return console.export_text().splitlines()


@pytest.mark.parametrize("width", [60, 110])
def test_the_panel_says_it_all(width):
    clock = Clock()
    state = RunState(12, 4, "tiny, seed 0", clock=clock)
    state.finish_step(0, {"evaluation/avg@8": 0.142})
    for step in range(1, 7):
        finish(state, clock, step, 3.1, **{**ROW, "reward/mean": step / 10})
    state.finish_step(6, {"evaluation/avg@8": 0.55})
    state.set_activity("critic_update", 64, 256)
    rows = panel(width, state)
    assert all(len(row) == width for row in rows)
    text = "\n".join(rows)
    for part in ("tiny, seed 0", "step 7 / 12  policy", "critic update", "64 / 256",
                 "reward +0.600", "length 96.3", "entropy 0.412", "explained variance 0.831",
                 "tokens/s 4,812", "time per step 3.1 s", "19 s left",
                 "accuracy 0.550 after step 6, 0.142 before training",
                 "\u2581\u2582\u2584\u2585\u2587\u2588 +0.10 to +0.60"):  # fmt: skip
        assert part in text, part


def test_the_panel_at_the_start_and_at_the_end():
    clock = Clock()
    state = RunState(2, 1, clock=clock)
    text = "\n".join(panel(80, state))
    assert "step 1 / 2  value pretraining" in text and "starting" in text and "left" not in text
    finish(state, clock, 1, 1.0)
    finish(state, clock, 2, 61.0)
    text = "\n".join(panel(80, state))
    assert "step 2 / 2  policy" in text and "finished" in text and "62" not in text
    assert "1 m 02 s so far" in text and "left" not in text


SCRIPT = """
import logging, os, sys
logging.basicConfig(stream=sys.stderr, level=logging.INFO)
from vapo_megatron.run.progress import Progress
leader = sys.argv[2] != "other rank"
with Progress("auto", 2, 1, "tiny", log_path=sys.argv[1], is_leader=leader) as progress:
    for step in (1, 2):
        progress.phase("generation", 1, 2)
        logging.info("a library")
        print("a print")
        os.write(1, b"C++ code\\n")
        os.system("echo a child")
        progress.step(step, {"reward/mean": 0.5})
    progress.note("a note")
    if sys.argv[2] == "fail":
        raise SystemExit("the reason")
print("afterwards")
"""


def on_terminal(*arguments):
    """Run SCRIPT on a pseudo-terminal -> what the terminal received, and the exit status."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "90", "LINES": "30"}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *map(str, arguments)],
        stdin=follower, stdout=follower, stderr=follower, cwd=ROOT, env=environment,
    )  # fmt: skip
    os.close(follower)
    received = b""
    while True:
        try:
            chunk = os.read(leader, 65536)
        except OSError:
            break
        if not chunk:
            break
        received += chunk
    os.close(leader)
    return received.decode(), process.wait()


def test_other_output_goes_to_the_log_while_the_display_is_live(tmp_path):
    log = tmp_path / "run" / "output.log"
    terminal, status = on_terminal(log, "go on")
    assert status == 0
    for text in ("a library", "a print", "C++ code", "a child"):
        assert text not in terminal and log.read_text().count(text) == 2, text
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal)
    assert "\u2500 tiny \u2500" in shown and "finished" in shown and str(log)[:20] in shown
    assert shown.index("a note") < shown.rindex("finished") < shown.index("afterwards")
    # The cursor is visible meanwhile: a process that is killed leaves it so.
    assert terminal.index("\x1b[?25h") < terminal.index("a note")


def test_other_ranks_on_the_terminal_write_to_the_log_too(tmp_path):
    log = tmp_path / "output.log"
    terminal, status = on_terminal(log, "other rank")
    assert status == 0 and terminal.split() == ["afterwards"]
    assert log.read_text().count("C++ code") == 2


def test_an_error_ends_the_display_and_reaches_the_terminal(tmp_path):
    terminal, status = on_terminal(tmp_path / "output.log", "fail")
    assert status == 1 and terminal.rstrip().endswith("the reason")
    assert "the reason" not in (tmp_path / "output.log").read_text()
