"""examples/smollm/compare_trl.py without TRL: its arithmetic, what it starts, what it refuses.

Not exercised: TRL itself, which only the comparison needs.
"""

import argparse
import json
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from examples.smollm import compare_trl
from vapo_megatron.config import load_config


def result(seconds, peak_bytes, accuracy):
    """The first step loads and compiles; it counts in nothing."""
    steps = [dict.fromkeys(("seconds", "generation", "scoring", "update"), 1e6)]
    steps += [{"seconds": s, "generation": s / 4, "scoring": 0.1, "update": s / 2} for s in seconds]
    return {"steps": steps, "peak_bytes": peak_bytes, "accuracy": accuracy}


def test_the_table_has_medians_and_ratios_of_paired_runs():
    runs = {
        "grpo": [result([8, 10, 30], 4e9, 0.3), result([20, 20, 20], 5e9, 0.5)],
        "trl": [result([20, 20, 20], 6e9, 0.2), result([40, 40, 40], 6e9, 0.4)],
        "vapo": [result([40, 40, 40], 7e9, 0.1), result([20, 20, 20], 7e9, 0.3)],
    }
    head, _, *rows = compare_trl.table(runs).splitlines()
    cells = {row.split(" | ")[0].strip("| "): row.strip("| ").split(" | ")[1:] for row in rows}
    assert head.startswith("| | seconds a step | of TRL's | sampling")
    assert cells["GRPO here"] == ["15.0", "0.50", "3.8", "0.1", "7.5", "5.0 GB", "0.300, 0.500"]
    assert cells["TRL's GRPO"][:2] == ["30.0", "1.00"]
    assert cells["VAPO here"][:2] == ["30.0", "1.25"], "of each pair, not of the means"


def test_both_sides_have_the_same_batch(monkeypatch, tmp_path):
    commands = []

    def watched(command, out):
        commands.append(command)
        out.mkdir(parents=True)
        row = {"time/step_seconds": 9.0, "time/generation_seconds": 4.0}
        row |= {"time/reward_seconds": 1.0, "reward/mean": 0.5}
        # The first row is of what comes before training, without a step's sampling.
        rows = [{"time/step_seconds": 0.1}, row]
        (out / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        (out / "steps.jsonl").write_text(json.dumps({"seconds": 7.0}) + "\n")
        return 11

    monkeypatch.setattr(compare_trl, "_watched", watched)
    options = argparse.Namespace(model=Path("model"), data=Path("data"), steps=3)
    prompts, root = tmp_path / "prompts.parquet", tmp_path / "new"
    for side in ("grpo", "vapo"):
        steps, peak = compare_trl._ours(compare_trl.SIDES[side], root / side, 5, prompts, options)
        assert peak == 11 and steps == [
            {"seconds": 9.0, "generation": 4.0, "scoring": 1.0, "update": 4.0, "reward": 0.5}
        ]
    steps, _ = compare_trl._trl(compare_trl.SIDES["trl"], tmp_path / "trl", 5, prompts, options)
    assert steps == [{"seconds": 7.0}]
    ours, critic, trl = commands
    given = dict(zip(trl[2::2], trl[3::2]))
    config = load_config(
        [root / "grpo.yaml", "grpo"], [text for text in ours if "=" in text and text[0] != "-"]
    )
    assert str(root / "grpo.yaml") in ours and config.parallel.world_size == 1
    assert not config.evaluation.sources and config.evaluation.path is None
    assert config.data.train_path == given["--data"] == str(prompts) and not config.data.sources
    assert not config.data.shuffle, "nor does the other side"
    algorithm = config.algorithm
    assert (float(given["--adam-beta2"]), given["--loss"]) == (config.optimizer.adam_beta2, "grpo")
    assert algorithm.loss_aggregation == "sample", "what TRL calls the loss grpo"
    assert int(given["--responses"]) == algorithm.responses_per_step
    assert int(given["--group"]) == algorithm.group_size
    assert int(given["--mini-batch"]) == algorithm.mini_batch_size
    assert float(given["--learning-rate"]) == config.optimizer.actor_learning_rate
    assert int(given["--max-response-tokens"]) == config.rollout.max_response_tokens
    assert int(given["--steps"]) == algorithm.num_steps == 3, "no steps without an update"
    assert "algorithm.value_pretraining_steps=0" in critic


def test_both_sides_have_the_same_prompts(tmp_path):
    tasks = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    for task, size in zip(tasks, (30, 4)):
        rows = [{"prompt": f"{task.stem}{i}"} for i in range(size)]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), task)
    written = []
    for seed in (0, 0, 1):
        compare_trl.write_prompts(tmp_path / "out.parquet", tasks, seed, steps=3)
        written.append(pyarrow.parquet.read_table(tmp_path / "out.parquet")["prompt"].to_pylist())
    assert written[0] == written[1] != written[2] and len(written[0]) == 3 * 48 // 8
    assert [text[0] for text in written[0]] == ["a", "b"] * 9, "of each task as many"
    assert len(set(written[0][::2])) == 9 and len(set(written[0][1::2])) == 4


def test_a_failed_run_says_why(tmp_path):
    with pytest.raises(SystemExit, match="ended with code 3:\nno such thing"):
        compare_trl._watched(
            [sys.executable, "-c", "print('no such thing'); exit(3)"], tmp_path / "out"
        )


def test_it_names_what_is_missing(tmp_path, capsys):
    assert compare_trl.main(["--model", str(tmp_path / "model")]) == 2
    assert "run_vapo_smollm.sh --dry-run" in capsys.readouterr().out
