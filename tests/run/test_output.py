"""When a step's time begins. Not exercised: the display; the rows are test_metrics.py's."""

import time

from vapo_megatron.config import VapoConfig

START_UP = 0.5
"""Seconds."""


def times_of_the_first_step(run_dir, start):
    """A step that takes no time, of a process that has needed time to load; a worker's function."""
    from vapo_megatron.parallel import groups
    from vapo_megatron.run.output import RunOutput

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
