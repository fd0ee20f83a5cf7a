"""Groups in flight through a whole run in one process: metrics, checkpoints, and a resume.

vLLM alone, with the way of the weights into it, is a stand-in that counts tokens. Not exercised:
several ranks (tests/rollout/test_carry_over.py), vLLM (tests/e2e/test_carry_over.py).
"""

import contextlib
import os
from unittest import mock

import pytest
import torch.distributed as dist

from tests.dumped import GROUP_SIZE, MODEL, NUM_RESPONSES, config
from tests.rollout.test_carry_over import Engine as Counting
from tests.rollout.test_dynamic_sampling import vllm_replaced_by
from tests.rollout.tiny_tokenizer import ANSWERS, write_tiny_tokenizer
from tests.test_sampling_wiring import Sync, lines
from tests.weights.tiny_hf import write_tiny_hf
from tests.workers import free_port
from vapo_megatron.errors import CheckpointError
from vapo_megatron.rollout.carried import CARRIED

STEPS, SAVED_AT, EXTRA = 4, 2, 3


class Engine(Counting):
    """Its responses are of the model's tokens."""

    def __init__(self, hf_path, inputs, rollout, *, dtype, seed, offload):
        super().__init__(dist.get_rank(), dist.get_world_size())
        self.policy_version = None

    def go_on(self, begun, seeds, sampling, version, *rest):
        assert version == self.policy_version and sampling.seed_role == "train"
        return super().go_on(begun, seeds, sampling, version, *rest)

    def token(self, version, at):
        return 3 + (7 * version + at) % (MODEL["vocab"] - 3)

    def shutdown(self):
        pass


def fit(hf, tmp, name, extra, port):
    """Make the steps that the run of this name lacks; what ends it, or the dumped versions."""
    from vapo_megatron.rollout import sampling
    from vapo_megatron.rollout.dump import read_file
    from vapo_megatron.training.loop import VapoTrainer

    with contextlib.suppress(ValueError):
        dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    settings = config(
        hf,
        algorithm={"value_pretraining_steps": 1, "policy_steps": STEPS - 1},
        rollout={"carry_over_groups": extra, "max_lag": 2, "max_response_tokens": 20},
        optimizer={"actor_learning_rate": 1e-2, "actor_warmup_updates": 0},
        data={"train_path": str(tmp / "train.jsonl"), "shuffle": False},
        reward={"num_workers": 1},
        checkpoint={"hf_export": False, "every_steps": SAVED_AT, "keep_last": 9},
        logging={
            "run_dir": str(tmp / name), "tensorboard": False, "progress": "off", "dump_steps": 9,
            "rollout_groups": 9,
        },
    )  # fmt: skip
    with vllm_replaced_by(Engine), mock.patch.object(sampling, "WeightSync", Sync):
        try:
            with VapoTrainer(settings) as trainer:
                trainer.fit()
        except CheckpointError as error:
            return str(error)
    files = sorted((tmp / name).glob("replay/step_*/*"))
    return [[s.rollout for s in read_file(file)] for file in files]


def measured(row):
    """What does not depend on a machine's speed and memory."""
    varying = ("time/", "memory/", "tokens_per_second")
    return {name: value for name, value in row.items() if not name.startswith(varying)}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("carry_over_wiring")
    rows = [f'{{"prompt": "w{i % 40 + 3}", "answer": "7"}}\n' for i in range(40)]
    (tmp / "train.jsonl").write_text("".join(rows))
    hf = write_tiny_hf(tmp / "hf", **MODEL)
    write_tiny_tokenizer(hf, MODEL["vocab"], last=ANSWERS)
    return hf, tmp


def test_a_resumed_run_has_the_same_groups_and_metrics(workers, inputs):
    hf, tmp = inputs
    (whole,) = workers.run(1, fit, hf, tmp, "run", EXTRA, free_port())
    run = tmp / "run"
    rows = lines(run / "metrics.jsonl")
    assert len({r.prompt.index for step in whole for r in step}) == STEPS * len(whole[0]) // (
        GROUP_SIZE
    )
    assert [len(step) for step in whole] == [NUM_RESPONSES] * STEPS
    for step, (row, found) in enumerate(zip(rows[1:], whole, strict=True)):
        now = max(0, step - 1)
        lags = [now - version for r in found for version, n in r.versions for _ in range(n)]
        assert row["rollout/lag_mean"] == pytest.approx(sum(lags) / len(lags))
        assert row["rollout/lag_max"] == max(lags)
        assert row.get("rollout/lag_share@1", 0) == pytest.approx(lags.count(1) / len(lags))
        assert 0 < row["rollout/effective_sample_fraction"] <= 1 + 1e-9
    assert max(row["rollout/lag_max"] for row in rows[1:]) > 0
    shown = [r for f in sorted(run.glob("rollouts/*")) for g in lines(f) for r in g["responses"]]
    parts = [[list(part) for part in r.segments] for step in whole for r in step]
    assert [r.get("versions", []) for r in shown] == parts and any(parts)

    saved = run / f"checkpoints/step_{SAVED_AT:06d}"
    assert len(list((saved / CARRIED).iterdir())) == 1
    (run / "checkpoints/latest").write_text(saved.name)
    (refused,) = workers.run(1, fit, hf, tmp, "run", 0, free_port())
    assert "has groups in flight" in refused and "carry_over_groups=0 would lose" in refused
    (again,) = workers.run(1, fit, hf, tmp, "run", EXTRA, free_port())
    assert again == whole
    assert list(map(measured, lines(run / "metrics.jsonl"))) == list(map(measured, rows))
