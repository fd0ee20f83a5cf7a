"""Options of both judges that a run relies on: what is cut, what is kept, and how outages count.

Against the server of test_judge.py. Not exercised: a language model.
"""

import re
import sqlite3
import time

import pytest

from tests.reward.test_judge import Server, judged
from vapo_megatron.reward.judge import Judge, Pairwise
from vapo_megatron.reward.verifier import Problem

OUTAGE_SECONDS = 1.0
PROBLEM = [Problem("1 + 1?", "2")]


def test_a_long_response_keeps_its_end():
    asked = []

    def answer(prompt):
        asked.append(prompt)
        return "YES", {"A": -0.1, "B": -2.0}

    with Server(answer) as server:
        for kind, options in (
            (Judge, {"template": "Response: {response}\n\nReply"}),
            (Pairwise, {}),
        ):
            for response in ("at first 5, but 2 is", "is 2"):
                judge = kind(base_url=server.url, model="m", response_characters=6, **options)
                judged(judge, [response], PROBLEM)
    texts = [re.search(r"Response: (.*)\n\nReply", prompt)[1] for prompt in asked[:2]]
    assert texts == ["t 2 is", "is 2"]
    pairs = [re.search(r"A: (.*)\n\n.*Answer B: (.*)\n", prompt).groups() for prompt in asked[2:]]
    assert sorted(pairs) == [("2", "is 2"), ("2", "t 2 is"), ("is 2", "2"), ("t 2 is", "2")]


def test_a_pairwise_judge_keeps_its_answers(tmp_path):
    with Server(lambda prompt: ("A", {"A": -0.5, "B": -1.0})) as server:
        found = []
        for _ in range(2):
            judge = Pairwise(base_url=server.url, model="m", cache=str(tmp_path / "kept"))
            found.append(judged(judge, ["it is 2"], PROBLEM))
            assert len(server.asked) == 2
    assert found[0] == found[1] and found[0][0].score is not None


@pytest.mark.parametrize(("between", "status"), [("YES", "correct"), (400, "failed")])
def test_an_outage_long_after_another_has_its_own_time(between, status):
    """The first began longer ago than an outage may last; an answer in between has ended it."""
    state = {"answer": 503}
    with Server(lambda prompt: state["answer"]) as server:
        judge = Judge(base_url=server.url, model="m", outage_seconds=OUTAGE_SECONDS)
        begun = time.monotonic()
        assert [v.status for v in judge.score(["a"], PROBLEM)] == ["failed"]
        time.sleep(max(0.0, begun + 1.5 * OUTAGE_SECONDS - time.monotonic()))
        state["answer"] = between
        assert [v.status for v in judge.score(["a"], PROBLEM)] == [status]
        state["answer"], asked = 503, len(server.asked)
        assert [v.status for v in judged(judge, ["a"], PROBLEM)] == ["failed"]
        assert len(server.asked) > asked + 1, "tried once, as if the first outage went on"


@pytest.mark.parametrize("damage", ["value", "file"])
def test_a_damaged_cache_is_asked_around(damage, tmp_path):
    (tmp_path / "kept").mkdir()
    path = tmp_path / "kept" / "rank_00000.sqlite"
    with Server(lambda prompt: "YES") as server:
        for _ in range(2):
            judge = Judge(base_url=server.url, model="m", cache=str(path.parent))
            if path.exists() and server.asked:
                if damage == "value":
                    with sqlite3.connect(path) as file:
                        file.execute("UPDATE answers SET value = '{'")
                else:
                    data = path.read_bytes()
                    path.write_bytes(data[:4096] + b"x" * (len(data) - 4096))
            assert [v.status for v in judged(judge, ["a"], PROBLEM)] == ["correct"]
        assert len(server.asked) == 2
