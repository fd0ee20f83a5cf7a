"""Whole runs of two trainers and two rollout workers: data, lag, verdicts, checkpoints, resume.

Real worlds, orders, staging, verdicts and files, as in tests/rollout/disaggregated/served.py. Not
exercised: vLLM and the weights' way to it (tests/e2e/test_disaggregated.py, -m slow).
"""

import itertools
import json
from collections import Counter
from hashlib import sha256
from statistics import fmean

import pytest

from tests import jsonl
from tests.dumped import GROUP_SIZE, NUM_RESPONSES
from tests.rollout.disaggregated.served import (
    REFUSED,
    TRAINERS,
    WORKERS,
    apart,
    inputs,
    is_worker,
    served,
    stand_ins,
)
from tests.whole_run import measured, trainer
from vapo_megatron.rollout.dump import read_file

STEPS, SAVED_AT, EXTRA, LAG, MAX_LAG = 5, 2, 3, 1, 2
GROUPS = NUM_RESPONSES // GROUP_SIZE
CARRIES = {"carry_over_groups": EXTRA, "max_lag": MAX_LAG}
CASES = {"carries": CARRIES, "lags": {"lag": LAG}, "both": {"lag": LAG, **CARRIES}}


def fit(hf, tmp, name, rollout):
    """Make the steps that the run of this name lacks; a worker's function."""
    given = apart(
        hf, tmp, tmp / name, rollout=rollout,
        evaluation={"path": str(tmp / "test.jsonl"), "samples": 2, "every_steps": 2},
    )  # fmt: skip
    if is_worker(given):
        served(given)
    else:
        with stand_ins(), trainer(given) as made:
            made.fit()


def dumped(run, step):
    """Of each rollout worker its responses of a step, from 0."""
    return [read_file(file) for file in sorted((run / f"replay/step_{step + 1:06d}").iterdir())]


@pytest.fixture(scope="module", params=CASES)
def whole(request, workers, tmp_path_factory):
    """(The run, its rollout settings, and how to make the steps that it lacks.)"""
    hf, tmp = inputs(tmp_path_factory.mktemp("disaggregated_wiring"))
    name, rollout = request.param, CASES[request.param]

    def run():
        workers.run(TRAINERS + WORKERS, fit, hf, tmp, name, rollout)

    run()
    return tmp / name, rollout, run


def test_each_group_is_trained_on_once_and_whole(whole):
    run, rollout, _ = whole
    drawn = []
    for step in range(STEPS):
        found = [item.rollout for part in dumped(run, step) for item in part]
        assert [r.position for r in found] == list(range(NUM_RESPONSES))
        groups = [found[at : at + GROUP_SIZE] for at in range(0, NUM_RESPONSES, GROUP_SIZE)]
        for group in groups:
            assert [r.sample for r in group] == list(range(GROUP_SIZE))
            assert len({r.prompt.index for r in group}) == 1
        drawn += [group[0].prompt.index for group in groups]
    assert sorted(drawn) == [i for i in range(STEPS * GROUPS + 1) if i != REFUSED]
    if "max_lag" not in rollout:
        assert drawn == sorted(drawn)


def test_metrics_are_of_all_rollout_workers_responses(whole):
    run, rollout, _ = whole
    rows, most = jsonl.read(run / "metrics.jsonl"), 0
    for step, row in enumerate(rows[1:]):
        parts, now = dumped(run, step), max(0, step - 1)
        found = list(itertools.chain(*parts))
        lags = [now - version for s in found for version, n in s.rollout.versions for _ in range(n)]
        shares = {f"rollout/lag_share@{k}": lags.count(k) / len(lags) for k in set(lags) - {0}}
        ours = [s for s in found if s.rollout.prompt.index % 3]
        expected = {
            "rollout/lag_mean": fmean(lags), "rollout/lag_max": max(lags), **shares,
            "reward/correct_fraction": fmean(s.is_correct for s in found),
            "reward/own/letters": fmean(len(s.text) for s in ours),
            "reward/by_verifier/math/share": 1 - len(ours) / NUM_RESPONSES,
        }  # fmt: skip
        named = ("rollout/lag", "reward/own", "reward/correct", "reward/by_verifier/math/share")
        assert {n: v for n, v in row.items() if n.startswith(named)} == pytest.approx(expected)
        first, second = ([v for s in part for v, _ in s.rollout.versions] for part in parts)
        most = max(most, *lags)
        assert max(lags) <= rollout.get("lag", 0) + rollout.get("max_lag", 0)
        if "max_lag" not in rollout:
            assert set(first) == set(second) == {max(0, step - LAG - 1)}
    assert most > 0
    evaluated = [step for step, row in enumerate(rows) if "evaluation/avg@2" in row]
    assert evaluated == [0, 2, 4, 5]


def test_what_is_shown_is_of_all_rollout_workers(whole):
    run, _, _ = whole
    for step in range(STEPS):
        parts = dumped(run, step)
        assert len(parts) == WORKERS and all(parts)
        sampled = sorted(itertools.chain(*parts), key=lambda s: s.rollout.position)
        groups = jsonl.read(run / f"rollouts/step_{step + 1:06d}.jsonl")
        shown = [r for group in groups for r in group["responses"]]
        assert [r["text"] for r in shown] == [s.text for s in sampled]
        parts = [[list(part) for part in s.rollout.segments] for s in sampled]
        assert [r.get("versions", []) for r in shown] == parts


def test_the_timeline_has_each_of_its_phases_once(whole):
    run, _, _ = whole
    spans = [span for row in jsonl.read(run / "timeline.jsonl") for span in row["sampler"]]
    begins = [begin for *_, begin, _ in spans]
    assert len(set(begins)) == len(begins)
    steps = Counter(step for phase, step, *_ in spans if phase == "generation")
    assert steps == Counter(range(1, STEPS + 1))


def test_a_checkpoint_has_the_data_and_all_that_is_in_flight(whole):
    run, rollout, _ = whole
    saved = run / f"checkpoints/step_{SAVED_AT:06d}"
    state = json.loads((saved / "state.json").read_text())["run"]
    extra = rollout.get("carry_over_groups", 0)
    # The row that is refused is passed over.
    assert state["data"]["position"] == SAVED_AT * GROUPS + extra + 1
    names = []
    if "lag" in rollout:
        names += [f"in_flight/step_{SAVED_AT + 1:06d}/rank_{i:05d}.safetensors" for i in (0, 1)]
    if extra:
        names += [f"in_flight/carried/replica_{i:05d}.safetensors" for i in range(WORKERS)]
    sums = json.loads((saved / "checksums.json").read_text())
    found = {n: value for n, value in sums.items() if n.startswith("in_flight")}
    assert found.keys() == set(names)
    assert {n: sha256((saved / n).read_bytes()).hexdigest() for n in names} == found


def test_a_resumed_run_makes_the_same_steps(whole):
    """The last test: it makes some of the steps again."""
    run, _, again = whole
    before = measured(run), [dumped(run, step) for step in range(STEPS)]
    (run / "checkpoints/latest").write_text(f"step_{SAVED_AT:06d}")
    again()
    assert (measured(run), [dumped(run, step) for step in range(STEPS)]) == before
