"""Small whole runs that sample: their options, and what is asked of them while they go on."""

import time

from tests.dumped import config
from tests.fingerprint import digest_of_file
from tests.whole_run import measured, write_inputs
from vapo_megatron.rollout.dump import read_file

# vLLM on a CPU takes heads of 32.
MODEL = dict(num_layers=2, hidden=64, heads=2, kv_heads=2, ffn=48, vocab=60)


def options(tmp, *, problems, steps, saved_at, **rollout):
    """Options of a run of one trainer: a step of value pretraining, and others of the policy.

    problems: for training; steps: in all; saved_at: every so many; rollout: more of that section.
    """
    hf, _ = write_inputs(tmp, MODEL, train=problems, test=2)
    settings = config(
        hf,
        algorithm={"value_pretraining_steps": 1, "policy_steps": steps - 1},
        rollout={"kv_cache_bytes": 16_000_000, **rollout},
        optimizer={"actor_learning_rate": 1e-2, "actor_warmup_updates": 0},
        data={"train_path": str(tmp / "train.jsonl")},
        evaluation={"path": str(tmp / "test.jsonl"), "samples": 2},
        reward={"num_workers": 1},
        checkpoint={"every_steps": saved_at, "keep_last": 9, "asynchronous": False},
        logging={"tensorboard": False, "dump_steps": steps, "progress": "plain"},
    )
    (tmp / "run.yaml").write_text(settings.to_yaml())
    return ["--config", str(tmp / "run.yaml")]


def into(run_dir):
    return f"logging.run_dir={run_dir}"


def wait_for_row(launched, run_dir, number):
    metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + 900
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > number):
        assert launched.is_running(), f"no row {number} came\n{launched.wait(60).stderr[-3000:]}"
        assert time.monotonic() < deadline, f"no row {number} came in time"
        time.sleep(0.02)


def killed(launched, run_dir, step):
    """Kill a run once this step is saved; the file that names a run's last checkpoint."""
    wait_for_row(launched, run_dir, step)
    latest = run_dir / "checkpoints/latest"
    while latest.read_text() != f"step_{step:06d}":
        assert launched.is_running()
        time.sleep(0.02)
    launched.kill()
    return latest


def dumped(run_dir, step):
    """A step's scored responses, by position."""
    files = (run_dir / f"replay/step_{step:06d}").iterdir()
    return sorted((s for f in files for s in read_file(f)), key=lambda s: s.rollout.position)


def kept(run_dir, step):
    """Row, responses and checkpoint of a step that a resumed run makes again."""
    files = [
        *run_dir.glob(f"checkpoints/step_{step:06d}/*/*.distcp"),
        *run_dir.glob(f"replay/step_{step:06d}/*.safetensors"),
        *run_dir.glob(f"rollouts/step_{step:06d}.jsonl"),
    ]
    return measured(run_dir)[step], {str(file): digest_of_file(file) for file in files}
