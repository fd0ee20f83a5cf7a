"""Groups that go on, on two ranks that train too: lag, files with their checksums, and a resume.

Real ranks, verifier, data and files; the engine counts tokens. Not exercised: vLLM.
"""

import contextlib
from collections import Counter
from hashlib import sha256
from statistics import fmean

import pytest
import torch.distributed as dist

from tests.dumped import NUM_RESPONSES
from tests.rollout.disaggregated.served import phase
from tests.rollout.test_dynamic_sampling import sampling
from tests.rollout.test_partial import Counting
from tests.whole_run import settings, write_inputs
from vapo_megatron.errors import Stopped
from vapo_megatron.rollout.partial.files import PARTIAL
from vapo_megatron.rollout.source import StepRequest

STEPS, SAVED_AT, EXTRA, RANKS = 4, 2, 3, 2


class TokensEngine(Counting):
    """Its responses are of the model's tokens."""

    def __init__(self, seed):
        super().__init__(seed=seed)

    def token(self, version, at):
        return 3 + (7 * version + at) % 50


def source_of(hf, tmp, engine=TokensEngine):
    given = settings(
        hf,
        tmp / "run",
        algorithm={"policy_steps": STEPS},
        rollout={
            "carry_over_groups": EXTRA,
            "max_lag": 2,
            "max_response_tokens": 20,
            "max_logprob_difference": None,
        },
        parallel={"world_size": RANKS},
        data={"train_path": str(tmp / "train.jsonl"), "shuffle": False},
        reward={"verifier": "tests.rollout.disaggregated.lengths:Lengths", "num_workers": 1},
    )
    source, _ = sampling(given, engine)
    return contextlib.closing(source), source


def sampled(hf, tmp, directory, first):
    """(Of each step: this rank's responses, metrics; sums after SAVED_AT steps); a worker's."""
    closing, source = source_of(hf, tmp)
    found, sums = [], {}
    with closing:
        if first:
            source.prompts.next(first * NUM_RESPONSES // 4 + EXTRA)
            source.resume(first, directory)
        for step in range(first, STEPS):
            scored, metrics = source.rollouts(StepRequest(step, step, phase))
            found.append((scored, metrics))
            # The latest step is not in the checkpoint.
            if step == SAVED_AT and not first:
                sums = source.save_in_flight(SAVED_AT, directory)
    return found, sums


def test_lag_is_of_all_ranks_and_so_are_the_files(workers, tmp_path):
    hf, _ = write_inputs(tmp_path, train=40)
    saved = tmp_path / "saved"
    whole = workers.run(RANKS, sampled, hf, tmp_path, saved, 0)
    differ = False
    for step, parts in enumerate(zip(*(found for found, _ in whole), strict=True)):
        assert sorted(s.rollout.position for scored, _ in parts for s in scored) == list(
            range(NUM_RESPONSES)
        )
        counts = [
            Counter(
                step - version
                for s in scored
                for version, n in s.rollout.versions
                for _ in range(n)
            )
            for scored, _ in parts
        ]
        both, (one, other) = sum(counts, Counter()), (metrics for _, metrics in parts)
        total = both.total()
        expected = {
            "rollout/lag_mean": sum(lag * n for lag, n in both.items()) / total,
            "rollout/lag_max": max(both),
            **{f"rollout/lag_share@{lag}": n / total for lag, n in both.items() if lag},
            "reward/own/letters": fmean(len(s.text) for scored, _ in parts for s in scored),
        }
        assert one == other == pytest.approx(expected)
        differ |= counts[0][1] / counts[0].total() != counts[1][1] / counts[1].total()
    drawn = {s.rollout.prompt.index for found, _ in whole for scored, _ in found for s in scored}
    assert len(drawn) == STEPS * NUM_RESPONSES // 4, "each problem once"
    assert differ, "the first rank's lag is not both ranks'"
    names = [f"{PARTIAL}/replica_{i:05d}.safetensors" for i in range(RANKS)]
    assert [sums for _, sums in whole] == [
        {n: sha256((saved / n).read_bytes()).hexdigest() for n in names}
    ] * RANKS
    again = workers.run(RANKS, sampled, hf, tmp_path, saved, SAVED_AT)
    assert [found for found, _ in again] == [found[SAVED_AT:] for found, _ in whole]


def stopped(hf, tmp):
    """What becomes of a step for which the last rank has no time, and of the one after it."""
    closing, source = source_of(hf, tmp)
    has_time = dist.get_rank() != RANKS - 1
    with closing:
        source.rollouts(StepRequest(0, 0, phase))
        with pytest.raises(Stopped):
            source.rollouts(StepRequest(1, 1, phase, has_time=lambda: has_time))
        return source.save_in_flight(1, tmp / "stopped")


def test_a_rank_without_time_stops_all(workers, tmp_path):
    hf, _ = write_inputs(tmp_path, train=40)
    one, other = workers.run(RANKS, stopped, hf, tmp_path)
    assert one == other and len(one) == RANKS
