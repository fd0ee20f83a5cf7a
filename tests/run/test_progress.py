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

from vapo_megatron.run.progress import Progress, format_seconds

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


def test_a_plain_line_per_step(capsys):
    with Progress("plain", 34, 14) as progress:
        progress.phase("generation", 3, 8)
        progress.step(0, {"evaluation/avg@8": 0.142, "time/evaluation_seconds": 2.0})
        progress.step(1, {name: v for name, v in ROW.items() if name != "actor/entropy"})
        progress.note("checkpoint saved")
        progress.step(34, {**ROW, "evaluation/avg@8": 0.93})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step  0/34  before training    accuracy 0.142"
    assert lines[1] == (
        "step  1/34  value pretraining  reward -0.412  length 96.3  explained variance 0.831"
        "  tokens/s 4,812  time per step 3.1 s"
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


@pytest.mark.parametrize(("mode", "is_main"), [("off", True), ("plain", False), ("live", False)])
def test_off_and_other_ranks_show_nothing(capfd, tmp_path, mode, is_main):
    with Progress(mode, 2, 0, is_main=is_main, log_path=tmp_path / "log.txt") as progress:
        progress.phase("generation", 1, 2)
        progress.step(1, ROW)
        progress.note("note")
    assert capfd.readouterr() == ("", "")


def test_a_step_s_signs_end_its_line(capsys):
    with Progress("plain", 2, 0) as progress:
        progress.step(1, {"reward/mean": -1.0}, ["all rewards equal", "no answer parsable"])
        assert progress._figures["warning"] == "all rewards equal, no answer parsable"
        progress.step(2, {"reward/mean": 0.0})
        assert "warning" not in progress._figures
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("reward -1.000  (all rewards equal; no answer parsable)")
    assert second.endswith("reward +0.000")


def test_missing_and_null_figures_are_left_out(capsys):
    with Progress("plain", 1, 0) as progress:
        progress.step(1, {"reward/mean": None})
    assert capsys.readouterr().out == "step 1/1  policy\n"


def after(progress, clock, step, seconds, **metrics):
    """What is said of the time left after a step of so many seconds."""
    clock.now += seconds
    progress.step(step, {"time/step_seconds": seconds, **metrics})
    return progress.bars.tasks[0].fields["note"]


def test_time_left_tells_the_two_kinds_of_step_apart():
    clock = Clock()
    progress = Progress("off", 10, 4, clock=clock)
    # The first step warms up kernels and caches: it says nothing of the others.
    assert after(progress, clock, 1, 9.0) == ""
    # 8 more of 2 s, and policy steps may take longer.
    assert after(progress, clock, 2, 2.0) == "> 16 s left"
    # (2 + 4) / 2 = 3 s each.
    assert after(progress, clock, 3, 4.0) == "> 21 s left"
    assert after(progress, clock, 4, 3.0) == "" == after(progress, clock, 5, 20.0)
    # 4 policy steps of 20 s.
    assert after(progress, clock, 6, 20.0) == "1 m 20 s left"
    # However long a step takes: rich's own estimate forgets what is older than 30 s.
    assert after(progress, clock, 7, 7200.0) == "3 h 00 m left"
    for step in range(8, 11):
        left = after(progress, clock, step, 10.0)
    assert left == ""


def test_after_a_resume_steps_count_from_it():
    clock = Clock()
    progress = Progress("off", 10, 4, first_step=7, clock=clock)
    assert progress.bars.tasks[0].description == "step 7 / 10  policy"
    assert progress.bars.tasks[0].completed == 6
    assert after(progress, clock, 7, 5.0) == ""
    assert after(progress, clock, 8, 5.0) == "10 s left"


def test_durations_as_people_read_them():
    cases = {0.421: "0.42 s", 12.34: "12.3 s", 59.97: "1 m 00 s", 245: "4 m 05 s",
             3599.6: "1 h 00 m", 11520: "3 h 12 m", 187200: "2 d 04 h"}  # fmt: skip
    assert {seconds: format_seconds(seconds) for seconds in cases} == cases


def panel(width, progress):
    console = Console(record=True, force_terminal=True, width=width, file=io.StringIO())
    console.print(progress._panel())
    return console.export_text().splitlines()


@pytest.mark.parametrize("width", [60, 110])
def test_the_panel_says_it_all(width):
    clock = Clock()
    progress = Progress("off", 12, 4, title="tiny [seed 0]", log_path=Path("log"), clock=clock)
    progress.step(0, {"evaluation/avg@8": 0.142})
    text = "\n".join(panel(width, progress))
    assert "step 1 / 12  value pretraining" in text and "starting" in text
    assert "accuracy 0.142 before training" in text
    for step in range(1, 7):
        after(progress, clock, step, 3.1, **ROW)
    progress.step(6, {"evaluation/avg@8": 0.55})
    progress.phase("critic_update", 64, 256)
    rows = panel(width, progress)
    assert all(len(row) == width for row in rows)
    text = "\n".join(rows)
    for part in ("tiny [seed 0]", "step 7 / 12  policy", "critic update", "64 / 256",
                 "reward -0.412", "length 96.3", "entropy 0.412", "explained variance 0.831",
                 "tokens/s 4,812", "time per step 3.1 s", "19 s left",
                 "accuracy 0.550 after step 6", "all other output: log"):  # fmt: skip
        assert part in text, part


def test_the_panel_at_the_end():
    clock = Clock()
    progress = Progress("off", 2, 1, clock=clock)
    after(progress, clock, 1, 1.0)
    progress.phase("generation")
    after(progress, clock, 2, 61.0)
    text = "\n".join(panel(80, progress))
    assert "step 2 / 2  policy" in text and "finished" in text and "left" not in text


SCRIPT = """
import logging, os, sys
from pathlib import Path
logging.basicConfig(stream=sys.stderr, level=logging.INFO)
from vapo_megatron.run.progress import Progress
is_main = sys.argv[2] != "other rank"
log = Path(sys.argv[1])
with Progress("auto", 2, 1, title="tiny", log_path=log, is_main=is_main) as progress:
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
