"""Groups in flight through a whole run in one process: metrics, checkpoints, and a resume.

vLLM alone, with the way of the weights into it, is a stand-in that counts tokens. Not exercised:
several ranks (tests/rollout/test_partial.py), vLLM (tests/e2e/test_carry_over.py).
"""

import pytest

from tests import jsonl
from tests.dumped import GROUP_SIZE, MODEL, NUM_RESPONSES
from tests.rollout.test_partial import Counting
from tests.whole_run import measured, settings, trainer, without_vllm, write_inputs
from vapo_megatron.errors import CheckpointError
from vapo_megatron.rollout.partial.files import PARTIAL

STEPS, SAVED_AT, EXTRA = 4, 2, 3


class TokensEngine(Counting):
    """Its responses are of the model's tokens."""

    def __init__(self, seed):
        super().__init__(seed=seed)

    def run(self, work, sampling, version, *rest):
        assert version == self.policy_version and sampling.seed_role == "train"
        return super().run(work, sampling, version, *rest)

    def token(self, version, at):
        return 3 + (7 * version + at) % (MODEL["vocab"] - 3)


def fit(hf, tmp, name, extra):
    """Make the steps that the run of this name lacks; what ends it, or the dumped versions."""
    from vapo_megatron.rollout.dump import read_file

    given = settings(
        hf,
        tmp / name,
        algorithm={"value_pretraining_steps": 1, "policy_steps": STEPS - 1},
        rollout={"carry_over_groups": extra, "max_lag": 2, "max_response_tokens": 20},
        optimizer={"actor_learning_rate": 1e-2, "actor_warmup_updates": 0},
        data={"train_path": str(tmp / "train.jsonl"), "shuffle": False},
        reward={"num_workers": 1},
        checkpoint={"hf_export": False, "every_steps": SAVED_AT, "keep_last": 9},
        logging={"dump_steps": 9, "rollout_groups": 9},
    )
    with without_vllm(TokensEngine):
        try:
            with trainer(given) as made:
                made.fit()
        except CheckpointError as error:
            return str(error)
    files = sorted((tmp / name).glob("replay/step_*/*"))
    return [[s.rollout for s in read_file(file)] for file in files]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("partial_wiring"), train=40)


def test_a_resumed_run_has_the_same_groups_and_metrics(workers, inputs):
    hf, tmp = inputs
    (whole,) = workers.run(1, fit, hf, tmp, "run", EXTRA)
    run = tmp / "run"
    rows = jsonl.read(run / "metrics.jsonl")
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
    shown = [
        r for f in sorted(run.glob("rollouts/*")) for g in jsonl.read(f) for r in g["responses"]
    ]
    parts = [[list(part) for part in r.segments] for step in whole for r in step]
    assert [r.get("versions", []) for r in shown] == parts and any(parts)

    saved = run / f"checkpoints/step_{SAVED_AT:06d}"
    assert len(list((saved / PARTIAL).iterdir())) == 1
    (run / "checkpoints/latest").write_text(saved.name)
    (refused,) = workers.run(1, fit, hf, tmp, "run", 0)
    assert "has groups in flight" in refused and "carry_over_groups=0 would lose" in refused
    before = measured(run)
    (again,) = workers.run(1, fit, hf, tmp, "run", EXTRA)
    assert again == whole
    assert measured(run) == before
