"""When a step's time begins. Not exercised: the display; the rows are test_metrics.py's."""

import contextlib
import io
import time

from vapo_megatron.config import VapoConfig
from vapo_megatron.parallel import groups
from vapo_megatron.run.output import RunOutput

START_UP = 3.0
"""Seconds."""


def times_of_the_first_step(run_dir, start):
    """A step that takes no time, of a process that has needed time to load; a worker's function."""
    logging = {"run_dir": str(run_dir), "tensorboard": False, "progress": "off"}
    config = VapoConfig(logging=logging)
    output = RunOutput(config, groups.initialize(config.parallel))
    time.sleep(START_UP)
    with output.opened(start):
        if not start:
            output.step(0, {})
        return output.step(start + 1, {})


def test_a_steps_time_is_its_own_after_a_resume_too(workers, tmp_path):
    for start in (0, 3):
        times = workers.run(1, times_of_the_first_step, tmp_path / str(start), start)[0]
        assert times["time/step_seconds"] < START_UP


def lines_of_steps(run_dir, rows):
    """What is printed of steps with these metrics; a worker's function."""
    logging = {"run_dir": str(run_dir), "tensorboard": False, "progress": "plain"}
    config = VapoConfig(logging=logging)
    output, told = RunOutput(config, groups.initialize(config.parallel)), io.StringIO()
    with contextlib.redirect_stdout(told), output.opened(0):
        output.step(0, {})
        for step, row in enumerate(rows, 1):
            output.step(step, row)
    return told.getvalue().splitlines()


def test_signs_are_on_their_steps_lines_and_explained_after_three(workers, tmp_path):
    (lines,) = workers.run(1, lines_of_steps, tmp_path, [{"reward/std": 0.0}] * 4)
    steps = [line for line in lines if line.startswith("step ") and "/" in line.split()[1]]
    assert [line.endswith("(all rewards equal)") for line in steps] == [False, *[True] * 4]
    (explained,) = (line for line in lines if line not in steps)
    assert explained.startswith("step 3: 3 steps in a row: all rewards were equal, from which")
    assert lines.index(explained) == lines.index(steps[3]) + 1
