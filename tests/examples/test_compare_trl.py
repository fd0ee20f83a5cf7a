"""What compare_trl.py starts here, and what it makes of the steps.

Not exercised: TRL, which is no requirement, and the models' training.
"""

import argparse
import importlib.util
from pathlib import Path

import pytest

from tests.examples.tiny import ROOT, write_lines
from vapo_megatron.config import load_config


@pytest.fixture
def compare_trl(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples/smollm"))
    spec = importlib.util.spec_from_file_location(
        "compare_trl", ROOT / "examples/smollm/compare_trl.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["grpo", "vapo"])
def test_a_run_here_is_one_process_without_evaluations(compare_trl, name, monkeypatch, tmp_path):
    """Its configuration loads; a row without a step of sampling is none."""
    started = []

    def watched(command, out):
        started.append(command)
        out.mkdir()
        step = {"time/reward_seconds": 1.0, "reward/mean": 0.5, "time/generation_seconds": 2.0}
        rows = [{"time/step_seconds": 40.0, "time/evaluation_seconds": 40.0},
                {"time/step_seconds": 9.0, **step}]  # fmt: skip
        write_lines(out / "metrics.jsonl", rows)
        return 123

    monkeypatch.setattr(compare_trl, "_watched", watched)
    options = argparse.Namespace(model=Path("models/m"), steps=3)
    side, out = compare_trl.SIDES[name], tmp_path / "new" / name
    steps, peak = compare_trl._ours(side, out, 5, [Path("data/gcd.parquet")], options)
    assert peak == 123 and steps == [
        {"seconds": 9.0, "generation": 2.0, "scoring": 1.0, "update": 6.0, "reward": 0.5}
    ]
    train, first, file, second, recipe, *overrides = started[0][3:]
    assert (train, first, second) == ("train", "--config", "--config")
    config = load_config([file, recipe], overrides)
    assert not config.evaluation.sources and config.parallel.world_size == 1
    assert (config.algorithm.advantage_estimator == "gae") == (name == "vapo")
    assert (config.algorithm.policy_steps, config.algorithm.value_pretraining_steps) == (3, 0)


def test_the_table_has_medians_after_the_first_step_and_ratios_within_a_round(compare_trl):
    def result(*seconds):
        part = {"generation": 1.0, "scoring": 0.0}
        steps = [{"seconds": s, "update": s - 1, **part} for s in (99.0, *seconds)]
        return {"steps": steps, "peak_bytes": 2e9, "accuracy": 0.25}

    runs = {
        "grpo": [result(5.0, 7.0), result(10.0)],
        "trl": [result(12.0), result(10.0)],
        "vapo": [result(24.0), result(10.0)],
    }
    rows = [line.split(" | ")[1:3] for line in compare_trl.table(runs).splitlines()[2:]]
    assert rows == [["8.0", "0.75"], ["11.0", "1.00"], ["17.0", "1.50"]]
