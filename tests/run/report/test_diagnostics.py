"""Plots of the kept responses' tokens, against numbers worked out by hand.

Not exercised: their drawing, which browsers alone do.
"""

import json

import pytest
import torch

from tests import jsonl
from tests.run.report.test_page import Page, write_run
from vapo_megatron.run.directory import Run, read_run
from vapo_megatron.run.metrics import MetricsWriter
from vapo_megatron.run.report.diagnostics import plots
from vapo_megatron.run.report.page import build_report

PREDICTS = "Does the critic predict how a response ends?"
BY_LENGTH = "Does the critic predict returns at every length?"
CALIBRATED = "Is the critic calibrated?"
ADVANTAGE = "Which parts of a response have a high advantage?"
REACH = "How far back does the reward reach?"
WEIGH = "Which response lengths dominate the loss?"
UNSURE = "Is the policy uncertain where responses of a group diverge?"
LEFT = "Are there problems left to learn from?"
LEARNT = "Which problems are learnt, and which forgotten?"
MASTERED = "How many held-out problems has the policy mastered?"
SOLVED = "Which held-out problems does it solve, and since when?"


def response(status, pieces, values, advantages=None, entropy=None, num_tokens=None):
    tokens = {
        "pieces": list(pieces),
        "values": values,
        "advantages": advantages or [0.0] * len(pieces),
        "entropy": entropy or [0.0] * len(pieces),
    }
    reward = 1.0 if status == "correct" else -1.0
    length = num_tokens or len(pieces)
    return {
        "status": status, "reward": reward, "num_tokens": length, "truncated": False,
        "tokens": tokens,
    }  # fmt: skip


@pytest.fixture
def found(tmp_path, monkeypatch):
    def of(*responses, **algorithm):
        run = Run(tmp_path, {"algorithm": algorithm}, [], [1])
        monkeypatch.setattr(Run, "rollouts", lambda self, step: [{"responses": list(responses)}])
        return {p["title"]: {s["label"]: s["points"] for s in p["series"]} for p in plots(run)}

    return of


def test_value_and_return_by_position(found):
    a = response("correct", "xy", [0.25, 0.75])
    b = response("correct", "xy", [0.75, None])
    plot = found(a, b, response("wrong", "z", [-0.5]), gamma=0.5)[PREDICTS]
    # Two tokens stand at 1/4 and 3/4, in the third and eighth tenth; one token at 1/2, the sixth.
    assert plot["value, correct"] == [[0.25, 0.5], [0.75, 0.75]]
    assert plot["return, correct"] == [[0.25, 0.5], [0.75, 1.0]]
    assert plot["value, not correct"] == [[0.55, -0.5]]


def test_value_and_return_by_length(found):
    long = response("correct", "abcdefghij", [0.5] * 5 + [None] * 4 + [0.2])
    plot = found(long, response("wrong", "z", [-0.5]), response("correct", "z", [0.1]))[BY_LENGTH]
    # Bins of one token each up to the longest: 10. Six tokens of the long one have a value.
    assert plot["value"] == [[1, -0.2], [10, pytest.approx(2.7 / 6)]]
    assert plot["return"] == [[1, 0.0], [10, 1.0]]


def test_calibration(found):
    right, wrong = response("correct", "ab", [1.0, 0.8]), response("wrong", "ab", [0.0, 0.81])
    plot = found(right, wrong, gamma=0.5)[CALIBRATED]
    # Tenths of 0..1: 0 was followed by -0.5; 0.8 and 0.81 by 1 and -1; 1 by 0.5.
    assert plot["mean return"] == [[0.05, -0.5], [0.85, 0.0], [0.95, 0.5]]
    assert plot["mean value"] == [[0.05, 0.0], [0.85, pytest.approx(0.805)], [0.95, 1.0]]
    assert CALIBRATED not in found(response("wrong", "ab", [0.5, 0.5]))


@pytest.mark.parametrize("estimator", ["gae", "grpo"])
def test_without_a_critic_nothing_is_said_of_it(found, estimator):
    response_of_group = response("wrong", "xy", None, [0.5, -1.0])
    del response_of_group["tokens"]["values"]
    run = found(response_of_group, advantage_estimator=estimator)
    assert not {PREDICTS, BY_LENGTH, CALIBRATED} & set(run)
    assert (REACH in run) == (estimator == "gae")
    assert run[ADVANTAGE] == {"not correct": [[0.25, 0.5], [0.75, -1.0]]}


@pytest.mark.parametrize("alpha", [0.05, 0.2, 1e9])
def test_lambda_by_length_is_what_training_takes(found, alpha):
    from vapo_megatron.algorithm.gae import length_adaptive_lambda

    long = response("wrong", "x" * 100, [0.0] * 100)
    plot = found(long, length_adaptive_alpha=alpha, lambda_critic=0.9, gamma=0.99)[REACH]
    lengths = [n for n, _ in plot["actor's lambda"]]
    assert lengths[0] == 1 and lengths[-1] == 100 and len(lengths) == 41
    expected = length_adaptive_lambda(torch.tensor(lengths), alpha).tolist()
    assert [y for _, y in plot["actor's lambda"]] == pytest.approx(expected)
    assert {y for _, y in plot["critic's lambda"]} == {0.9}
    left = plot["share of the reward in the first token's advantage"]
    assert [y for _, y in left] == pytest.approx(
        [(0.99 * y) ** (n - 1) for n, y in zip(lengths, expected)]
    )
    same = found(long, lambda_actor=0.95, lambda_critic="same_as_actor")[REACH]
    assert {y for name in ("actor", "critic") for _, y in same[f"{name}'s lambda"]} == {0.95}


def episode(*turns):
    """Actions of these tokens, with rewards; the verdict gave 1 more."""
    text = "".join(action for action, _ in turns)
    ends = [sum(len(action) for action, _ in turns[: i + 1]) for i in range(len(turns))]
    found = response("correct", text, [0.0] * len(text))
    of_turns = [
        {"action": action, "observation": "o", "reward": reward, "end": end}
        for (action, reward), end in zip(turns, ends)
    ]
    return found | {"turns": of_turns, "reward": 1.0 + sum(reward for _, reward in turns)}


def test_lambda_counts_turns_where_gae_does(found):
    long = episode(("xx", 0.0), ("yyy", 0.0), ("z", 0.0), ("zz", 0.0))
    short = response("wrong", "xy", [0.0] * 2)
    options = {"gamma": 0.5, "lambda_actor": 0.8, "gae_unit": "turn"}
    plot = found(long, short, **options)[REACH]
    assert [n for n, _ in plot["actor's lambda"]] == [1, 2, 3, 4]
    left = plot["share of the reward in the first turn's advantage"]
    assert [y for _, y in left] == pytest.approx([0.4**n for n in range(4)])
    tokens = found(long, short, **{**options, "gae_unit": "token"})[REACH]
    assert [n for n, _ in tokens["actor's lambda"]] == list(range(1, 9))


@pytest.mark.parametrize(
    ("unit", "due"),
    [
        # 8 and 1 stand on the third token, 4 on the first.
        ("token", [4 + 9 / 4, 9 / 2, 9.0]),
        ("turn", [4 + 9 / 2, 9.0, 9.0]),
    ],
)
def test_rewards_of_turns_stand_on_their_actions(found, unit, due):
    plot = found(episode(("x", 4.0), ("yz", 8.0)), gamma=0.5, gae_unit=unit)[PREDICTS]
    assert [y for _, y in plot["return, correct"]] == due


def test_advantage_by_position_past_the_gap(found):
    # Two of ten tokens are kept, the first and the last.
    run = found(response("wrong", "xy", [0.0, 0.25], [0.5, -1.0], num_tokens=10))
    assert run[ADVANTAGE] == {"not correct": [[0.05, 0.5], [0.95, -1.0]]}
    assert run[PREDICTS]["value, not correct"] == [[0.05, 0.0], [0.95, 0.25]]


def test_shares_of_the_loss(found):
    plot = found(response("wrong", "x" * 10, [0.0] * 10), *[response("wrong", "y", [0.0])] * 2)
    shares = plot[WEIGH]
    # 12 tokens: 2 in responses of one token, 10 in that of ten; three responses.
    assert [p for p in shares["token-level (this run)"] if p[1]] == [[1, 2 / 12], [10, 10 / 12]]
    assert [p for p in shares["sample-level"] if p[1]] == [[1, 2 / 3], [10, 1 / 3]]


def test_shares_of_the_loss_without_truncated_responses(found):
    cut = response("wrong", "x" * 10, [0.0] * 10) | {"truncated": True}
    kept = [response("wrong", "y" * n, [0.0] * n) for n in (1, 3)]
    options = {"overlong_filtering": True, "loss_aggregation": "sample"}
    shares = found(cut, *kept, **options)[WEIGH]
    assert [p for p in shares["token-level"] if p[1]] == [[1, 1 / 4], [3, 3 / 4]]
    assert [p for p in shares["sample-level (this run)"] if p[1]] == [[1, 1 / 2], [3, 1 / 2]]
    assert WEIGH not in found(cut, **options)


def test_entropy_where_responses_part(found):
    plot = found(
        response("wrong", "ab", [0.0] * 2, entropy=[0.1, 2.0]),
        response("wrong", "ac", [0.0] * 2, entropy=[0.1, 3.0]),
        response("wrong", "ab", [0.0] * 2, entropy=[0.1, 4.0]),
    )[UNSURE]
    # All begin with a; b and c part there: (2 + 3 + 4) / 3.
    assert plot["where they diverge"] == [[0.75, 3.0]]
    assert plot["elsewhere"] == [[0.25, pytest.approx(0.1)]]


def test_runs_without_tokens_have_no_plots(tmp_path):
    page = Page(build_report(write_run(tmp_path / "run", num_steps=1)).read_text())
    assert page.data["plots"] == [] and json.dumps(page.data)


def test_pass_rates_of_problems(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(1, {})
        writer.write_problems(1, [7, 8, 9, 9], [0, 4, 1, 3], [4] * 4)
        writer.write_problems(2, [5, 8, 6, 9], [4, 0, 4, 2], [4] * 4)
        writer.write_problems(3, [5, 8, 6, 9], [4, 0, 4, 2], [4] * 4)
    # What a resume at step 3 drops is written anew.
    MetricsWriter(tmp_path, tensorboard=False, resume_step=3).close()
    found = {p["title"]: p for p in plots(read_run(tmp_path))}
    shares = {s["label"]: s["points"] for s in found[LEFT]["series"]}
    assert shares["none correct"] == [[1, 0.25], [2, 0.25]]
    assert shares["some"] == [[1, 0.5], [2, 0.25]]
    assert shares["all"] == [[1, 0.25], [2, 0.5]]
    # Two problems were met twice; 8: mean of 1 and 0; 9: of 4 / 8 and 2 / 4. The same: by number.
    assert found[LEARNT]["cells"] == [
        {"name": "problem 8", "visits": [(1, 4, 4), (2, 0, 4)]},
        {"name": "problem 9", "visits": [(1, 4, 8), (2, 2, 4)]},
    ]
    assert found[LEARNT]["y"] == "2 problems" and not {MASTERED, SOLVED} & set(found)


def test_pass_rates_of_held_out_problems(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write_problems(2, [7], [1], [4])
        for step, correct in ((0, [0, 2, 0]), (2, [2, 1, 0]), (4, [2, 2, 2])):
            writer.write_problems(step, range(3), correct, [2] * 3, held_out=True)
    MetricsWriter(tmp_path, tensorboard=False, resume_step=3).close()
    found = {p["title"]: p for p in plots(read_run(tmp_path))}
    shares = {s["label"]: s["points"] for s in found[MASTERED]["series"]}
    assert shares["none correct"] == [[0, pytest.approx(2 / 3)], [2, pytest.approx(1 / 3)]]
    assert shares["all"] == [[0, pytest.approx(1 / 3)], [2, pytest.approx(1 / 3)]]
    assert found[SOLVED]["cells"] == [
        {"name": "problem 2", "visits": [(0, 0, 2), (2, 0, 2)]},
        {"name": "problem 0", "visits": [(0, 0, 2), (2, 2, 2)]},
        {"name": "problem 1", "visits": [(0, 2, 2), (2, 1, 2)]},
    ]
    assert LEARNT not in found and [p[1] for p in found[LEFT]["series"][1]["points"]] == [1.0]


def test_many_problems_and_steps_are_bounded(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step in range(1, 251):
            writer.write_problems(step, range(200), [step % 5] * 200, [4] * 200)
    found = {p["title"]: p for p in plots(read_run(tmp_path))}
    none = found[LEFT]["series"][0]["points"]
    # Three steps at a time: 84 points, the first of steps 1 to 3, the second of 4, 5 and 6.
    assert len(none) == 84 and none[:2] == [[2, 0.0], [5, pytest.approx(1 / 3)]]
    cells = found[LEARNT]["cells"]
    assert len(cells) == 40 and {len(c["visits"]) for c in cells} == {30}
    assert cells[0]["name"] == "problem 0" and cells[-1]["name"] == "problem 199"
    assert (cells[0]["visits"][0][0], cells[0]["visits"][-1][0]) == (1, 250)
    assert found[LEARNT]["y"] == "40 of 200 problems"


def test_without_a_configuration_nothing_is_said_of_tokens(tmp_path):
    run_dir = write_run(tmp_path / "run", num_steps=1)
    kept = run_dir / "rollouts" / "step_000001.jsonl"
    group = jsonl.read(kept)[0]
    group["responses"] = [response("wrong", "xy", [0.5, 1.0]) | {"text": "xy"}]
    jsonl.write(kept, [group])
    assert plots(read_run(run_dir))
    (run_dir / "config.yaml").unlink()
    assert plots(read_run(run_dir)) == []
