"""Runs whose groups go on over several steps: whole, killed and gone on, and against plain ones.

Real processes with megatron-core, vLLM and verifiers, and a tiny model that knows nothing. Which
groups are begun, cut and taken is in tests/rollout/test_partial.py. Not exercised: GPUs.
"""

import json

import pytest

from tests.dumped import GROUP_SIZE, NUM_RESPONSES
from tests.e2e.sampled_run import dumped, into, kept, killed, options
from tests.e2e.test_run import ended
from tests.whole_run import measured
from vapo_megatron.cli.train import main
from vapo_megatron.rollout.dump import read_arrays
from vapo_megatron.rollout.partial.files import PARTIAL, sampled_steps

STEPS, SAVED_AT, EXTRA, MAX_LAG, LIMIT = 6, 2, 3, 2, 24
CARRIES = [f"rollout.carry_over_groups={EXTRA}", f"rollout.max_lag={MAX_LAG}"]
APART = ["rollout.placement=disaggregated", "rollout.num_processes=2"]
# Options, processes, replicas, and how many steps the rollout workers are ahead.
PLACEMENTS = {
    "colocated": ([], 1, 1, 0),
    "apart": (APART, 3, 2, 0),
    "one step off": ([*APART, "rollout.lag=1", "evaluation.every_steps=3"], 3, 2, 1),
    "sharded, two steps off": (
        [*APART, "rollout.lag=2", "rollout.tensor_model_parallel_size=2"], 3, 1, 2,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Options of a run with one trainer: a step of value pretraining and five of the policy."""
    tmp = tmp_path_factory.mktemp("carry_over")
    # Fewer at a time than are in flight, so that some have hardly begun when a step ends.
    return options(
        tmp, problems=40, steps=STEPS, saved_at=SAVED_AT, max_num_sequences=12,
        max_response_tokens=LIMIT,
    )  # fmt: skip


def check_whole(run_dir, lag, steps=STEPS):
    """Each step has its share of groups, each problem is trained on once, none is left out."""
    drawn = []
    for step in range(1, steps + 1):
        found, row = [s.rollout for s in dumped(run_dir, step)], measured(run_dir)[step]
        assert [r.position for r in found] == list(range(NUM_RESPONSES))
        for at in range(0, NUM_RESPONSES, GROUP_SIZE):
            group = found[at : at + GROUP_SIZE]
            assert len({r.prompt.index for r in group}) == 1
            assert [r.sample for r in group] == list(range(GROUP_SIZE))
            drawn.append(group[0].prompt.index)
        tokens, now = {}, max(0, step - 2)
        for r in found:
            versions = [version for version, _ in r.versions]
            assert versions == sorted(set(versions)) and now - MAX_LAG - lag <= versions[0]
            assert versions[-1] <= max(0, now - lag)
            count = sum(n for _, n in r.versions)
            assert count == len(r.token_ids) == len(r.logprobs) <= LIMIT
            for version, count in r.versions:
                tokens[now - version] = tokens.get(now - version, 0) + count
        total = sum(tokens.values())
        assert row["rollout/lag_max"] == max(tokens)
        mean = sum(lag * count for lag, count in tokens.items()) / total
        assert row["rollout/lag_mean"] == pytest.approx(mean)
        shares = {int(n.split("@")[1]): v for n, v in row.items() if "lag_share" in n}
        assert shares == pytest.approx({k: n / total for k, n in tokens.items() if k})
    assert len(set(drawn)) == len(drawn) == steps * NUM_RESPONSES // GROUP_SIZE
    return drawn


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_killed_run_goes_on_with_its_groups_bit_by_bit(launch, given, tmp_path, placement):
    """From an older checkpoint, so that it makes steps again that it had made before."""
    run_dir, last = tmp_path, 2 * SAVED_AT
    more, processes, replicas, lag = PLACEMENTS[placement]
    command = [*given, *CARRIES, *more, into(run_dir)]
    launched = launch(main, command, world_size=processes)
    latest = killed(launched, run_dir, last)
    check_whole(run_dir, lag, last)
    made = [kept(run_dir, step) for step in range(SAVED_AT + 1, last + 1)]

    saved = run_dir / f"checkpoints/step_{SAVED_AT:06d}"
    assert len(sampled_steps(saved)) == lag
    names = [f"{PARTIAL}/replica_{i:05d}.safetensors" for i in range(replicas)]
    sums = json.loads((saved / "checksums.json").read_text())
    assert [name for name in sums if name.startswith(PARTIAL)] == names
    files = [read_arrays(saved / name) for name in names]
    assert sum(len(held) for held, _ in files) == EXTRA * GROUP_SIZE
    assert not all(arrays["is_whole"].all() for _, arrays in files)
    assert sum(len(s.rollout.token_ids) for held, _ in files for s in held) > 0

    latest.write_text(saved.name)
    assert "resumed" in ended(launch(main, command, world_size=processes)).stdout
    assert [kept(run_dir, step) for step in range(SAVED_AT + 1, last + 1)] == made
    drawn = check_whole(run_dir, lag)
    # The last step leaves nothing behind.
    assert not (run_dir / f"checkpoints/step_{STEPS:06d}/{PARTIAL}").exists()
    assert any(s.rollout.segments for step in range(1, STEPS + 1) for s in dumped(run_dir, step))
    assert len(drawn) == STEPS * NUM_RESPONSES // GROUP_SIZE

    # Replayed, its responses train the same model: old log-probabilities are computed anew.
    again = run_dir / "again"
    together = ["rollout.placement=colocated", "rollout.num_processes=0", "rollout.lag=0"]
    together += ["rollout.tensor_model_parallel_size=1"]
    ended(launch(main, [*command, *together, "--replay", str(run_dir), into(again)]))
    exports = [d / "hf_export/model.safetensors" for d in (run_dir, again)]
    assert exports[0].read_bytes() == exports[1].read_bytes()
