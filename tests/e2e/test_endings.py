"""Whole runs on a terminal, as a user ends them or as they end themselves: what stands last there.

One process, under the launcher. tests/cli/test_torchrun.py has two, and what each rank says.
"""

import os
import pty
import re
import select
import sys
import time

import pytest

from tests.e2e.test_run import ROOT, SMALL, TINY, base_model, environment, tiny_problems

pytestmark = pytest.mark.slow

ONE = ["parallel.world_size=1", "parallel.tensor_model_parallel_size=1"]
CONTROL_C = b"\x03"
SLOW = """
import time
from vapo_megatron.reward.verifier import Verdict

class Slow:
    def score(self, responses, problems):
        if "made up" not in responses[0]:  # As it is tried out with before the run.
            time.sleep(60)
        return [Verdict("wrong")]
"""


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Arguments of vapo train but for the run's directory."""
    out = tmp_path_factory.mktemp("given")
    (out / "slow_reward.py").write_text(SLOW)
    return out, [
        "--config", str(TINY), *SMALL, *ONE, "parallel.sequence_parallel=false",
        base_model(out / "base", 30), *tiny_problems(out), "evaluation.path=null",
    ]  # fmt: skip


def on_a_terminal(given, run_dir, *overrides, keys=()):
    """Run vapo train, and press keys once a text is shown; (exit code, all that was shown)."""
    out, arguments = given
    command = [sys.executable, "-m", "vapo_megatron", "train", *arguments, *overrides]
    command.append(f"logging.run_dir={run_dir}")
    more = {"TERM": "xterm", "PYTHONPATH": f"{ROOT}:{out}"}
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(ROOT)
        os.execve(command[0], command, {**environment(), **more})
    shown, waiting, seen, deadline = b"", list(keys), 0, time.monotonic() + 280
    while time.monotonic() < deadline:
        try:
            if select.select([terminal], [], [], 1)[0]:
                shown += os.read(terminal, 65536)
        except OSError:
            break
        if waiting and (found := re.compile(waiting[0].encode()).search(shown, seen)):
            waiting.pop(0)
            seen = found.end()
            os.write(terminal, CONTROL_C)
    os.close(terminal)  # A hang-up ends what has not ended.
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text.replace("\r", "").rstrip("\n")


def test_an_error_stands_last_below_the_live_display(given, tmp_path):
    slow = ["reward.verifier=slow_reward:Slow", "reward.timeout_seconds=0.2"]
    code, shown = on_a_terminal(given, tmp_path / "run", *slow)
    display, line = shown.rsplit("\n", 1)
    assert code == 2 and "all other output: " in display.rstrip().splitlines()[-1]
    assert re.match(
        r"error: 0 verdicts failed and 32 timed out, of 32: .*; the first: the verifier "
        r"slow_reward:Slow on row \d+ \(from 0\) of .*/train\.jsonl: more than 0\.2 seconds; .*"
        r"reward\.timeout_seconds=0\.2, ",
        line,
    )


def test_ctrl_c_saves_and_a_second_one_ends_at_once(given, tmp_path):
    code, shown = on_a_terminal(given, tmp_path / "run", keys=["step 2 / 4"])
    line = shown.rpartition("\n")[2]
    assert code == 130 and re.fullmatch(
        r"stopped by SIGINT after step [23]; start it again to resume", line
    )
    latest = (tmp_path / "run/checkpoints/latest").read_text()
    assert line.split()[5].rstrip(";") == str(int(latest.removeprefix("step_")))
    code, shown = on_a_terminal(
        given, tmp_path / "other", keys=["step 2 / 4", "SIGINT: the run stops"]
    )
    assert code == 130 and "Traceback" not in shown
    assert shown.rpartition("\n")[2].startswith("ended at once by a second SIGINT, without saving")


def test_ctrl_c_before_the_first_step_ends_at_once(given, tmp_path):
    code, shown = on_a_terminal(given, tmp_path / "run", keys=["found torch"])
    assert code == 130 and "Traceback" not in shown
    assert shown.rpartition("\n")[2].startswith("stopped by SIGINT before its first step; ")
