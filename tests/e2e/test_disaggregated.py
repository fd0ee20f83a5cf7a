"""Runs whose rollout workers are separate processes: against a colocated run, killed and resumed.

Real processes with megatron-core, vLLM and verifiers, and a tiny model that knows nothing. The
group that joins both worlds is in tests/parallel/test_worlds.py. Not exercised: GPUs, many nodes.
"""

import json
import os
import signal

import pytest

from tests.dumped import NUM_RESPONSES
from tests.e2e.sampled_run import dumped, into, kept, killed, options, wait_for_row
from tests.e2e.test_run import ended
from tests.whole_run import measured
from vapo_megatron.cli.train import main
from vapo_megatron.config.phases import Span
from vapo_megatron.rollout.dump import read_file
from vapo_megatron.run.directory import read_rows

STEPS, SAVED_AT = 5, 2
APART = ["rollout.placement=disaggregated", "rollout.num_processes=1"]


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Options of a run with one trainer: a step of value pretraining and four of the policy."""
    tmp = tmp_path_factory.mktemp("disaggregated")
    return options(tmp, problems=6, steps=STEPS, saved_at=SAVED_AT, max_num_sequences=16)


def check_equal(run_dir, expected, *, but=(), writers=1):
    """The same rows, checkpoints, export and shown responses, bit by bit; a row lacks `but`.

    writers: of a checkpoint's weights; trainers that hold the same ones are one.
    """

    def kept(run):
        return [{n: v for n, v in row.items() if not n.startswith(but)} for row in measured(run)]

    assert kept(run_dir) == kept(expected)
    names = [p.relative_to(expected) for p in expected.glob("checkpoints/step_*/*/*.distcp")]
    names += [p.relative_to(expected) for p in expected.glob("rollouts/*.jsonl")]
    assert len(names) == 3 * 2 * writers + STEPS
    # Pipeline stages export a file each.
    exported, found = (
        sorted(p.relative_to(run) for p in run.glob("hf_export/*.safetensors"))
        for run in (expected, run_dir)
    )
    assert exported == found and exported
    for name in [*names, *exported]:
        assert (run_dir / name).read_bytes() == (expected / name).read_bytes(), name


def check_lags(run_dir, lag, steps=STEPS):
    """Each step is trained on once, whole, and as its lag says; versions begin after step 1."""
    versions = [max(0, step - 1) for step in range(STEPS)]
    for step, row in enumerate(measured(run_dir)[1 : steps + 1]):
        expected = versions[max(0, step - lag)]
        scored = dumped(run_dir, step + 1)
        assert [s.rollout.position for s in scored] == list(range(NUM_RESPONSES))
        assert {s.rollout.policy_version for s in scored} == {expected}
        if lag:
            lags = row["rollout/lag_mean"], row["rollout/lag_max"]
            assert lags == (versions[step] - expected,) * 2


LAG_1 = [*APART, "rollout.lag=1", "rollout.verify_sync_every=2"]


def test_a_killed_run_with_lag_1_goes_on_bit_by_bit(launch, given, tmp_path):
    """From an older checkpoint, so that it makes steps again that it had made before."""
    run_dir, last = tmp_path, 2 * SAVED_AT
    command = [*given, *LAG_1, into(run_dir)]
    launched = launch(main, command, world_size=2)
    latest = killed(launched, run_dir, last)
    check_lags(run_dir, 1, last)
    made = [kept(run_dir, step) for step in range(SAVED_AT + 1, last + 1)]
    assert [len(files) for _, files in made] == [2, 4]
    # The step after it was sampled by older weights than the checkpoint holds.
    saved = run_dir / f"checkpoints/step_{SAVED_AT:06d}"
    name = f"in_flight/step_{SAVED_AT + 1:06d}/rank_00000.safetensors"
    assert {s.rollout.policy_version for s in read_file(saved / name)} == {SAVED_AT - 2}
    assert name in json.loads((saved / "checksums.json").read_text())

    latest.write_text(saved.name)
    assert "resumed" in ended(launch(main, command, world_size=2)).stdout
    assert [kept(run_dir, step) for step in range(SAVED_AT + 1, last + 1)] == made
    check_lags(run_dir, 1, STEPS)
    check_timeline(run_dir)


def check_timeline(run_dir):
    """A row a step; the sampler is at a step before the trainer is done with the one before it."""
    sides = [
        {side: [Span(*span) for span in row[side]] for side in ("trainer", "sampler")}
        for row in read_rows(run_dir / "timeline.jsonl")
    ]
    assert len(sides) == STEPS + 1
    sampled = {s.step: s for row in sides for s in row["sampler"] if s.phase == "generation"}
    updated = {s.step: s for row in sides for s in row["trainer"] if s.phase == "critic_update"}
    assert set(updated) == set(range(1, STEPS + 1))
    ahead = [step for step in updated if step + 1 in sampled]
    assert any(sampled[step + 1].begin < updated[step].end for step in ahead)
    # Each side's clock goes forward.
    for spans in (sampled, updated):
        begins = [spans[step].begin for step in sorted(spans)]
        assert begins == sorted(begins)


@pytest.mark.slow
def test_a_run_that_was_killed_is_as_one_that_was_not(launch, given, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    ended(launch(main, [*given, *LAG_1, into(whole)], world_size=2))
    check_lags(whole, 1)
    launched = launch(main, [*given, *LAG_1, into(cut)], world_size=2)
    wait_for_row(launched, cut, SAVED_AT + 1)
    launched.kill()
    ended(launch(main, [*given, *LAG_1, into(cut)], world_size=2))
    check_equal(cut, whole)
    check_lags(cut, 1)
    # Its responses, replayed colocated, train the same model.
    again = tmp_path / "again"
    together = ["rollout.placement=colocated", "rollout.num_processes=0", "rollout.lag=0"]
    ended(launch(main, [*given, *together, "--replay", str(cut), into(again)]))
    exports = [d / "hf_export/model.safetensors" for d in (cut, again)]
    assert exports[0].read_bytes() == exports[1].read_bytes()


def responses(run_dir, step):
    """Tokens and log-probabilities of a dumped step, by position."""
    found = [s.rollout for s in dumped(run_dir, step)]
    return [r.token_ids.tolist() for r in found], [x for r in found for x in r.logprobs]


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["tensor_model", "pipeline_model", "context"])
def test_lag_0_is_the_colocated_run(launch, given, tmp_path, shared):
    """Two trainers of one model, with as many replicas as there, and with another number."""
    layout = ["parallel.world_size=2", f"parallel.{shared}_parallel_size=2"]
    for name, more, count in (
        ("together", [], 2),
        ("apart", [*APART, "rollout.num_processes=2"], 4),
        ("three", [*APART, "rollout.num_processes=3"], 5),
        ("sharded", [*APART, "rollout.num_processes=2", "rollout.tensor_model_parallel_size=2"], 4),
    ):
        ended(launch(main, [*given, *layout, *more, into(tmp_path / name)], world_size=count))
        check_lags(tmp_path / name, 0)
    # Only what crosses between processes differs.
    writers = 1 if shared == "context" else 2
    check_equal(tmp_path / "apart", tmp_path / "together", but=("sync/",), writers=writers)
    tokens, logprobs = responses(tmp_path / "together", 1)
    for name in ("three", "sharded"):
        # Another number of replicas, or sharded ones: the same seeds; sums in another order.
        found = responses(tmp_path / name, 1)
        assert found[0] == tokens and found[1] == pytest.approx(logprobs, abs=1e-5), name


@pytest.mark.slow
def test_replicas_that_share_a_list_train_the_same_model(launch, given, tmp_path):
    """The trainers' own log-probabilities are the old ones, so who samples what leaves no trace."""
    more = [*APART, "rollout.num_processes=2", "rollout.lag=1", "rollout.max_num_sequences=4"]
    for name, shares in (("equal", "false"), ("shared", "true")):
        queue = [f"rollout.shared_queue={shares}", into(tmp_path / name)]
        ended(launch(main, [*given, *more, *queue], world_size=3))
        check_lags(tmp_path / name, 1)
    models = [tmp_path / name / "hf_export/model.safetensors" for name in ("equal", "shared")]
    assert models[0].read_bytes() == models[1].read_bytes()


@pytest.mark.slow
def test_both_sides_of_a_node_share_its_memory(launch, given, tmp_path):
    """A trainer has its batch and a checkpoint, a sampler what it samples and three versions."""
    more = [*LAG_1, "parallel.host_memory_gb=1e-4", into(tmp_path / "run")]
    launched = launch(main, [*given, *more], world_size=2)
    done = launched.wait(300)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: this run needs")]
    assert lines and len(set(lines)) == 1, done.stderr
    for part in ("on the node of rank 0 (", "for a step's responses", "for weights to come)"):
        assert part in lines[0], lines[0]
    assert "a smaller rollout.lag" in lines[0]


@pytest.mark.slow
def test_lag_2_is_the_same_every_time(launch, given, tmp_path):
    for name in ("first", "second"):
        more = [*APART, "rollout.num_processes=2", "rollout.lag=2", into(tmp_path / name)]
        ended(launch(main, [*given, *more], world_size=3))
        check_lags(tmp_path / name, 2)
    check_equal(tmp_path / "second", tmp_path / "first")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "stopped"])
@pytest.mark.parametrize("rank", [1, 2], ids=["trainer", "sampler"])
def test_a_lost_process_of_either_side_ends_all(launch, given, tmp_path, how, rank):
    """Rank 0 has the store here; under torchrun no rank has."""
    run_dir = tmp_path / "run"
    more = ["parallel.world_size=2", "rollout.lag=1", "timeouts.silence_seconds=6", into(run_dir)]
    launched = launch(main, [*given, *APART, *more], world_size=3)
    wait_for_row(launched, run_dir, 1)
    number = signal.SIGKILL if how == "killed" else signal.SIGSTOP
    os.kill(launched._processes[rank].pid, number)
    codes, done = launched.ended(apart_from=[rank])
    assert [code for r, code in enumerate(codes) if r != rank] == [1, 1]
    world = "trainer" if rank == 1 else "rollout worker"
    lines = {line for line in done.stderr.splitlines() if line.startswith("error: ")}
    assert lines, done.stderr
    for line in lines:
        assert f"error: rank {rank} ({world}, " in line and "is dead or stopped" in line
