"""Small whole runs that sample: their options, and what is asked of them while they go on."""

import json
import time

from tests.dumped import config
from tests.e2e.test_run import rows
from tests.fingerprint import digest_of_file
from tests.rollout.tiny_tokenizer import ANSWERS, write_tiny_tokenizer
from tests.weights.tiny_hf import write_tiny_hf

# vLLM on a CPU takes heads of 32.
MODEL = dict(num_layers=2, hidden=64, heads=2, kv_heads=2, ffn=48, vocab=60)


def options(tmp, *, problems, steps, saved_at, **rollout):
    """Options of a run of one trainer: a step of value pretraining, and others of the policy.

    problems: for training; steps: in all; saved_at: every so many; rollout: more of that section.
    """
    for name, count in (("train", problems), ("test", 2)):
        lines = [json.dumps({"prompt": f"w{i + 3}", "answer": "7"}) + "\n" for i in range(count)]
        (tmp / f"{name}.jsonl").write_text("".join(lines))
    hf = write_tiny_hf(tmp / "hf", **MODEL)
    write_tiny_tokenizer(hf, MODEL["vocab"], last=ANSWERS)
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


def ended(launched):
    """Wait for a run that must succeed."""
    done = launched.wait(900)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done


def wait_for_row(launched, run_dir, number):
    metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + 900
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > number):
        assert launched.is_running(), f"no row {number} came\n{launched.wait(60).stderr[-3000:]}"
        assert time.monotonic() < deadline, f"no row {number} came in time"
        time.sleep(0.02)


def kept(run_dir, step):
    """Row, responses and checkpoint of a step that a resumed run makes again."""
    files = [
        *run_dir.glob(f"checkpoints/step_{step:06d}/*/*.distcp"),
        *run_dir.glob(f"replay/step_{step:06d}/*.safetensors"),
        *run_dir.glob(f"rollouts/step_{step:06d}.jsonl"),
    ]
    return rows(run_dir)[step], {str(file): digest_of_file(file) for file in files}
