"""Plots of the kept responses' tokens, against numbers worked out by hand.

Not exercised: their drawing, which browsers alone do.
"""

import json

import pytest

from tests.test_report import Page, write_run
from vapo_megatron.report import build_report
from vapo_megatron.report_plots import plots
from vapo_megatron.run_directory import Run


def response(status, pieces, values, advantages=None, entropy=None, num_tokens=None):
    tokens = {
        "pieces": list(pieces),
        "values": values,
        "advantages": advantages or [0.0] * len(pieces),
        "entropy": entropy or [0.0] * len(pieces),
    }
    reward = 1.0 if status == "correct" else -1.0
    length = num_tokens or len(pieces)
    return {"status": status, "reward": reward, "num_tokens": length, "tokens": tokens}


@pytest.fixture
def found(tmp_path, monkeypatch):
    def of(*responses, gamma=1.0):
        run = Run(tmp_path, {"algorithm": {"gamma": gamma}}, [], [1])
        monkeypatch.setattr(Run, "rollouts", lambda self, step: [{"responses": list(responses)}])
        return {
            " ".join(p["title"].split()[:2]): {s["label"]: s["points"] for s in p["series"]}
            for p in plots(run)
        }

    return of


def test_value_and_return_by_position(found):
    a = response("correct", "xy", [0.25, 0.75])
    b = response("correct", "xy", [0.75, None])
    plot = found(a, b, response("wrong", "z", [-0.5]), gamma=0.5)["Does the"]
    # Two tokens stand at 1/4 and 3/4, in the third and eighth tenth; one token at 1/2, the sixth.
    assert plot["value, correct"] == [[0.25, 0.5], [0.75, 0.75]]
    assert plot["return, correct"] == [[0.25, 0.5], [0.75, 1.0]]
    assert plot["value, not correct"] == [[0.55, -0.5]]


def test_without_a_critic_nothing_is_said_of_it(found):
    response_of_group = response("wrong", "xy", None, [0.5, -1.0])
    del response_of_group["tokens"]["values"]
    run = found(response_of_group)
    assert "Does the" not in run
    assert run["Which part"] == {"not correct": [[0.25, 0.5], [0.75, -1.0]]}


def test_advantage_by_position_past_the_gap(found):
    # Two of ten tokens are kept, the first and the last.
    run = found(response("wrong", "xy", [0.0, 0.25], [0.5, -1.0], num_tokens=10))
    assert run["Which part"] == {"not correct": [[0.05, 0.5], [0.95, -1.0]]}
    assert run["Does the"]["value, not correct"] == [[0.05, 0.0], [0.95, 0.25]]


def test_shares_of_the_loss(found):
    plot = found(response("wrong", "x" * 10, [0.0] * 10), *[response("wrong", "y", [0.0])] * 2)
    shares = plot["Which lengths"]
    # 12 tokens: 2 in responses of one token, 10 in that of ten; three responses.
    assert [p for p in shares["token-level"] if p[1]] == [[1, 2 / 12], [10, 10 / 12]]
    assert [p for p in shares["sample-level"] if p[1]] == [[1, 2 / 3], [10, 1 / 3]]


def test_entropy_where_responses_part(found):
    plot = found(
        response("wrong", "ab", [0.0] * 2, entropy=[0.1, 2.0]),
        response("wrong", "ac", [0.0] * 2, entropy=[0.1, 3.0]),
        response("wrong", "ab", [0.0] * 2, entropy=[0.1, 4.0]),
    )["Is the"]
    # All begin with a; b and c part there: (2 + 3 + 4) / 3.
    assert plot["where they part"] == [[0.75, 3.0]]
    assert plot["elsewhere"] == [[0.25, pytest.approx(0.1)]]


def test_runs_without_tokens_have_no_plots(tmp_path):
    page = Page(build_report(write_run(tmp_path / "run", num_steps=1)).read_text())
    assert page.data["plots"] == [] and json.dumps(page.data)
