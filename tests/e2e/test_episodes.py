"""Runs with an environment: what a step is told of its episodes, replayed, resumed, and evaluated.

Two replicas in two processes, or a trainer and a rollout worker, with megatron-core, vLLM and the
environment's processes; a tiny model that knows nothing. Which tokens are sampled: see
tests/rollout/vllm/test_turns.py. Not exercised: GPUs.
"""

import json
from pathlib import Path

import pytest

from tests.dumped import NUM_RESPONSES
from tests.e2e.sampled_run import dumped, into, options
from tests.e2e.test_run import ended
from tests.whole_run import measured
from vapo_megatron.cli.main import main as vapo
from vapo_megatron.cli.train import main

STEPS = 4
COUNTING = f"environment.use={Path(__file__).with_name('counting.py')}:Counting"
PLAYED = [
    COUNTING, "reward.verifier=environment", "rollout.max_response_tokens=24",
    "environment.max_action_tokens=6", "environment.timeout_seconds=60",
    "algorithm.gae_unit=turn", "rollout.stop_token_ids=[2,3,4,5,6,7,8,9,10,11,12]",
]  # fmt: skip
TWO = ["parallel.world_size=2"]
APART = ["rollout.placement=disaggregated", "rollout.num_processes=1"]


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("episodes")
    return [*options(tmp, problems=12, steps=STEPS, saved_at=2), *PLAYED]


@pytest.fixture(scope="module")
def straight(launch, given, tmp_path_factory):
    """The run directory of two replicas."""
    run_dir = tmp_path_factory.mktemp("straight")
    ended(launch(main, [*given, *TWO, into(run_dir)], world_size=2))
    return run_dir


def test_a_step_tells_of_its_episodes(straight):
    for step, row in enumerate(measured(straight)[1:], 1):
        scored = dumped(straight, step)
        assert len(scored) == NUM_RESPONSES
        played = [item.rollout for item in scored]
        assert row["rollout/turns_mean"] == sum(len(r.turns) for r in played) / NUM_RESPONSES
        inserted = sum(r.num_inserted for r in played) / NUM_RESPONSES
        assert row["rollout/observation_tokens_mean"] == inserted > 0
        wrong = sum(r.episode.failed_calls for r in played) / NUM_RESPONSES
        assert row["rollout/failed_calls_mean"] == wrong > 0
        cut = sum(r.episode.cut == "environment.max_action_tokens" for r in played)
        assert row["rollout/cut_by_action_fraction"] == cut / NUM_RESPONSES
        total = sum(item.total_reward for item in scored) / NUM_RESPONSES
        assert row["reward/mean"] == pytest.approx(total)
        for item in scored:
            check_rewards(item)
    assert {len(r.turns) for r in played} >= {1, 3} and 0 < cut < NUM_RESPONSES


def check_rewards(item):
    """Of the words of each action, as counting.py has it, and of the verdict on their sum."""
    rollout = item.rollout
    ends = [0, *(turn.end for turn in rollout.turns)]
    # Stop tokens are words as the others, but for special ones.
    words = [
        sum(token > 2 for token in rollout.token_ids[start:end])
        for start, end in zip(ends, ends[1:])
    ]
    due = [0.25 * (count % 3) for count in words]
    if len(words) == 3 and not rollout.truncated:
        due[-1] = 0.5
        assert item.status == ("correct" if sum(words) % 2 == 0 else "wrong")
    else:
        assert rollout.truncated and item.status == "wrong"
        due[-1] = 0.0  # The environment was not asked.
    assert [turn.reward for turn in rollout.turns] == due
    assert item.reward == (1.0 if item.status == "correct" else -1.0)
    own = {end - 1: reward for end, reward in zip(ends[1:], due) if reward}
    assert dict(item.token_rewards) == own
    assert rollout.episode.failed_calls == sum(count % 2 for count in words[:-1])


def test_rollouts_show_turns(straight):
    for step in range(1, STEPS + 1):
        scored = {(s.rollout.prompt.index, s.rollout.sample): s for s in dumped(straight, step)}
        text = (straight / f"rollouts/step_{step:06d}.jsonl").read_text()
        for line in map(json.loads, text.splitlines()):
            for shown in line["responses"]:
                rollout = scored[line["prompt_index"], shown["sample"]].rollout
                assert [turn["reward"] for turn in shown["turns"]] == [
                    t.reward for t in rollout.turns
                ]
                said = ["".join(f"w{i}" for i in ids) for _, ids in rollout.inserted]
                assert [t["observation"] for t in shown["turns"] if t["observation"]] == said
                assert shown.get("cut_by", "") == rollout.episode.cut


def test_a_replay_is_the_same_bit_by_bit(launch, given, straight, tmp_path):
    command = [*given, *TWO, into(tmp_path), "--replay", str(straight)]
    ended(launch(main, command, world_size=2))
    for row, other in zip(measured(tmp_path), measured(straight), strict=True):
        # A replay evaluates nothing.
        assert row == {name: other[name] for name in row}


def test_a_resumed_run_plays_the_same_episodes(launch, given, straight):
    before, tokens = measured(straight)[3:], [sampled(straight, step) for step in (3, 4)]
    (straight / "checkpoints/latest").write_text("step_000002")
    assert "resumed" in ended(launch(main, [*given, *TWO, into(straight)], world_size=2)).stdout
    assert [sampled(straight, step) for step in (3, 4)] == tokens
    # Answers come at other moments, and what vLLM computes together rounds differently.
    for row, other in zip(measured(straight)[3:], before, strict=True):
        assert row == pytest.approx(other, rel=1e-3, abs=1e-4)


def sampled(run_dir, step):
    return [item.rollout.token_ids for item in dumped(run_dir, step)]


@pytest.mark.parametrize("lag", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rollout_worker_plays(launch, given, straight, tmp_path, lag):
    more = [*APART, f"rollout.lag={lag}"]
    ended(launch(main, [*given, *more, into(tmp_path)], world_size=2))
    for step in range(1, STEPS + 1):
        scored = dumped(tmp_path, step)
        for item in scored:
            check_rewards(item)
    assert sampled(tmp_path, 1) == sampled(straight, 1)
    assert "rollout/turns_mean" in measured(tmp_path)[1]


@pytest.mark.slow
def test_rounds_of_dynamic_sampling(launch, given, tmp_path):
    more = ["algorithm.dynamic_sampling=true", "algorithm.dynamic_sampling_max_rounds=3"]
    ended(launch(main, [*given, *more, into(tmp_path)]))
    alike = []
    for step in range(2, STEPS + 1):
        scored = dumped(tmp_path, step)
        rewards = [item.total_reward for item in scored]
        groups = [rewards[i : i + 4] for i in range(0, NUM_RESPONSES, 4)]
        assert all(len(set(group)) > 1 for group in groups), "mixed by their rewards"
        # Verdicts alone would have dropped it, or taken it to fill up.
        correct = [item.is_correct for item in scored]
        alike += [len(set(correct[i : i + 4])) == 1 for i in range(0, NUM_RESPONSES, 4)]
        assert measured(tmp_path)[step]["rollout/groups_filled"] == 0
    assert any(alike), "a group whose verdicts are all the same"


def test_a_failing_environment_stops_the_run(launch, given, tmp_path):
    done = launch(main, [*given, "environment.options={fails_at: 1}", into(tmp_path)]).wait()
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert "more than reward.max_failed_fraction=0.5 allows" in last and "as asked" in last


def test_evaluate(launch, given, straight, tmp_path):
    data, out = Path(given[1]).with_name("test.jsonl"), tmp_path / "samples.jsonl"
    command = ["evaluate", "--checkpoint", straight, "--data", data, "--out", out, "--samples", "8"]
    ended(launch(vapo, list(map(str, command))))
    _, *lines = map(json.loads, out.read_text().splitlines())
    responses = [each for line in lines for each in line["responses"]]
    assert len(responses) == 16 and all(each["earned"] >= 0 for each in responses)
    for each in responses:
        ends = [0, *(turn["end"] for turn in each["turns"])]
        assert ends[-1] == each["num_tokens"] and each["begin"].startswith("w")
        assert each["earned"] == sum(turn["reward"] for turn in each["turns"])
        assert ("cut_by" in each) == each["truncated"]
        sizes = [turn["action"].count("w") for turn in each["turns"]]
        for turn, size, after in zip(each["turns"], sizes, [*sizes[1:], None]):
            said = "".join(f"w{3 + i}" for i in range(size % 4))
            assert turn["observation"] == (said if after is not None else "")
    of_status = {"correct": 1.0, "wrong": -1.0}
    mean = sum(of_status[each["status"]] + each["earned"] for each in responses) / 16
    told = json.loads(out.with_suffix(".json").read_text())
    assert told["statistics"]["reward_mean"]["value"] == pytest.approx(mean)
