"""SWiRL in miniature: who judges a step, the environment, its jobs and its table.

What makes trajectories and states is in tests/cli and tests/e2e. Not exercised but by the slow
test: training itself. Which filter is worth more is for examples/run_swirl_tiny.sh to say.
"""

import json
import random

import pytest

from tests.examples.tiny import done, leave

# isort: split
import make_tokenizer
import task
from swirl import main, steps

from vapo_megatron.config import load_config
from vapo_megatron.data.problems import Problem

FILLER = task.SHORT.filler
QUESTION = "Qa9b*2c-3="
FIRST, SECOND = f"b*2=8{FILLER},", f"c-3=5{FILLER},"
"""9 * 2 = 18 -> 8, 8 - 3 = 5"""


@pytest.mark.parametrize(
    ("state", "action", "is_good"),
    [
        ("", FIRST, True), ("", f"b*2=7{FILLER},", False), ("", f"b*2~8{FILLER},", True),
        ("", f"b*2~7{FILLER},", False),
        ("", SECOND, False), ("", "Answer:5", False), ("", "", False),
        ("", f"b*2=8{FILLER}", False),
        (FIRST, SECOND, True), (FIRST, f"{SECOND}{SECOND}", False),
        # A step goes on from the result before it, right or wrong.
        (f"b*2=7{FILLER},", f"c-3=4{FILLER},", True), (f"b*2=7{FILLER},", SECOND, False),
        (FIRST + SECOND, "Answer:5", True), (FIRST + SECOND, "Answer:5<|endoftext|>", True),
        (FIRST + SECOND, "Answer:4", False), (FIRST + SECOND, f"d+1=6{FILLER},", False),
        # After steps that are none nothing is reasonable.
        ("b*,", SECOND, False), (FIRST + SECOND + FIRST, "Answer:5", False),
    ],
)  # fmt: skip
def test_an_action_is_judged_by_its_state(state, action, is_good):
    assert steps.reasonable(action, QUESTION + state) == is_good


def test_right_chains_are_reasonable_from_step_to_step():
    rng = random.Random(0)
    for _ in range(50):
        problem = task.draw_problem(rng, held_out=True)
        state = problem.prompt
        *actions, answer = task.chain(rng, problem).split(",")
        for action in (*(f"{action}," for action in actions), answer):
            assert steps.reasonable(action, state)
            state += action


def test_an_episode_is_a_chain_in_pieces():
    environment = steps.Steps()
    assert environment.reset(Problem(QUESTION, "5"), seed=1) == ""
    for action in (FIRST, SECOND):
        going = environment.step(action)
        assert not going.done and going.observation == ""
    assert environment.step("Answer:5").verdict is True
    for action in ("Answer:4", "Answer:", ""):
        ended = environment.step(action)
        assert ended.done and ended.verdict is False


def test_an_action_ends_at_the_comma(tmp_path):
    tokenizer = make_tokenizer.save_tokenizer(tmp_path, 512)
    stops = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(",")]
    assert f"rollout.stop_token_ids={stops}".replace(" ", "") in main.EPISODES
    jobs = {job.out.name: job for job in main.seed_jobs(tmp_path / "x", 0, main.WHOLE)}
    for name in main.ARMS:
        assert jobs[name].settings["rollout.stop_token_ids"] == stops
        longest = len(tokenizer(FIRST)["input_ids"])
        assert jobs[name].settings["rollout.max_response_tokens"] >= longest + 1


def test_arms_differ_in_the_filter_or_the_critic_alone(tmp_path):
    jobs = {job.out.name: job for job in main.seed_jobs(tmp_path, 3, main.WHOLE)}
    arms = {name: jobs[name].settings for name in main.ARMS}
    for name in ("outcome", "none"):
        changed = {k for k in arms["process"] if arms["process"][k] != arms[name].get(k)}
        assert changed <= {"data.train_path", "made from states_process"}
        assert arms[name]["data.train_path"] == f"states_{name}/states.jsonl"
    assert arms["process"]["algorithm.advantage_estimator"] == "grpo"
    assert arms["gae"]["algorithm.advantage_estimator"] == "gae"
    assert arms["gae"]["data.train_path"] == arms["process"]["data.train_path"]
    assert arms["gae"]["algorithm.value_pretraining_steps"] == main.WHOLE.value_steps
    told = {name: job.settings.get("command", "") for name, job in jobs.items()}
    assert "--samples 5 " in told["trajectories"]
    of_episodes = {told["before"].replace("base", "X")} | {
        told[f"after_{name}"].replace(f"{name}/hf_export", "X").replace(f"after_{name}", "before")
        for name in main.ARMS
    }
    assert len(of_episodes) == 1, "measured alike"
    known: set[str] = set()
    for job in jobs.values():
        assert set(job.needs) <= known
        known.add(job.name)


def write_result(job, accuracy):
    leave(job)
    if job.out.name.startswith("states_"):
        name = job.out.name.removeprefix("states_")
        counts = {"trajectories": 2000, "sub_trajectories": 3000, "states": 2500}
        summary = {"filters": {name: counts, "both": {}}}
        (job.out / "states.summary.json").write_text(json.dumps(summary))
    if job.out.name == "before" or job.out.name.startswith("after_"):
        summary = {"statistics": {"avg@4": {"value": accuracy}, "pass@4": {"value": 1.0}}}
        (job.out / "samples.json").write_text(json.dumps(summary))


def test_the_table_of_what_is_finished(tmp_path):
    for seed in (0, 1):
        for job in main.seed_jobs(tmp_path, seed, main.WHOLE):
            accuracy = 0.1 if job.out.name == "before" else 0.9
            if job.out.name != "after_gae":
                write_result(job, accuracy + 0.02 * seed)
    text = main.markdown([j for s in (0, 1) for j in main.seed_jobs(tmp_path, s, main.WHOLE)])
    lines = text.splitlines()
    assert lines[2] == "| base model | 0.110 +- 0.014 (0.100 0.120) | - | - | - |"
    assert lines[3] == (
        "| process | 0.910 +- 0.014 (0.900 0.920) | 2,000 +- 0 | 3,000 +- 0 | 2,500 +- 0 |"
    )
    assert len(lines) == 6 and "critic" not in text


def test_its_configuration_is_valid():
    assert load_config([main_config("tiny"), main_config("swirl_tiny")], []).evaluation.path is None


def main_config(name):
    from runner.jobs import CONFIGS

    return CONFIGS / f"{name}.yaml"


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_quick_form(tmp_path):
    done("swirl", "--quick", "--out", tmp_path)
    table = (tmp_path / "table.md").read_text()
    assert all(f"| {title} |" in table for title, *_ in main.ARMS.values())
