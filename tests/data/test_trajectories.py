"""Trajectories read, filtered and split into states, by vectors and by hand.

Not exercised: the command (tests/cli/states).
"""

import json
from pathlib import Path

import pytest

from vapo_megatron.data.trajectories import (
    FILTERS,
    Step,
    Trajectory,
    check_ends,
    is_kept,
    read_trajectories,
    state_key,
    state_row,
    states_of,
)
from vapo_megatron.errors import DataError

VECTORS = json.loads((Path(__file__).parent / "swirl.json").read_text())
HEADER = {
    "trajectories": 1, "weights": "ab12", "sampling": {"samples": 5}, "environment": {},
    "judge": None, "chat": True,
}  # fmt: skip
LINE = {
    "question_id": 7, "sample": 0, "prompt": "Which?",
    "steps": [{"action": "look", "observation": "seen"}, {"action": "A"}],
    "answer": "A", "outcome": True,
}  # fmt: skip


@pytest.fixture
def read(tmp_path):
    """read(lines, header's fields) -> (header, trajectories)."""

    def run(*lines, **header):
        path = tmp_path / "t.jsonl"
        rows = [{**HEADER, **header}, *lines]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return read_trajectories(path)

    return run


def refusal(read, *lines, **header):
    with pytest.raises(DataError) as caught:
        read(*lines, **header)
    assert "\n" not in str(caught.value)
    return str(caught.value).rpartition("/")[2]


def test_the_sub_trajectories_of_the_vectors(read):
    given = dict(VECTORS["trajectory"])
    assert given.pop("finish") == "answer"
    _, (trajectory,) = read(given)
    found = []
    for state in states_of(trajectory):
        row = state_row(trajectory, state)
        assert row.pop("answer") is None
        found.append({**row, "action": state.action})
    assert found == VECTORS["sub_trajectories"]


@pytest.mark.parametrize("case", VECTORS["filters"], ids=lambda case: case["name"])
def test_the_filters_of_the_vectors(read, case):
    last = len(case["process"]) - 1
    steps = [
        {"action": f"a{i}", "observation": None if i == last else "o", "process": process}
        for i, process in enumerate(case["process"])
    ]
    line = {**LINE, "steps": steps, "outcome": case["outcome"]}
    _, (trajectory,) = read({**line, "truncated": case["name"].startswith("cut off")})
    assert {name: is_kept(trajectory, name) for name in FILTERS} == case["kept"]
    counts = {name: is_kept(trajectory, name) * len(states_of(trajectory)) for name in FILTERS}
    assert counts == case["sub_trajectories"]


def test_a_truncated_trajectory_is_not_right():
    trajectory = Trajectory("t", 0, 0, "p", (Step("a", None, 1),), outcome=True, truncated=True)
    assert [name for name in FILTERS if is_kept(trajectory, name)] == ["none", "process"]


def test_as_text_states_follow_each_other(read):
    steps = [{"action": "a,", "observation": "o"}, {"action": "b,", "observation": ""},
             {"action": "c"}]  # fmt: skip
    header, found = read({**LINE, "prompt": "p:", "steps": steps}, chat=False, ends=[","])
    check_ends(header, found)
    assert [state.prompt for state in states_of(found[0])] == ["p:", "p:a,o", "p:a,ob,"]


def test_observations_that_are_messages_and_a_prompt_that_is_continued(read):
    tool = {"role": "tool", "content": "4"}
    begun = {"role": "assistant", "content": "So", "prefix": True}
    steps = [{"action": " look", "observation": [tool, tool]}, {"action": "4"}]
    prompt = [{"role": "user", "content": "2+2"}, begun]
    _, (trajectory,) = read({**LINE, "prompt": prompt, "steps": steps})
    first, second = (state.prompt for state in states_of(trajectory))
    assert first == prompt
    assert second == [prompt[0], {"role": "assistant", "content": "So look"}, tool, tool]


def test_a_truncated_trajectory_may_end_with_an_observation(read):
    steps = [{"action": "look", "observation": "seen"}]
    _, (trajectory,) = read({**LINE, "steps": steps, "outcome": None, "truncated": True})
    assert len(states_of(trajectory)) == 1


def test_columns_stay_but_for_who_judges_answers(read):
    schema = {"type": "function", "function": {"name": "f"}}
    line = {**LINE, "topic": "x", "verifier": "math"}
    _, (trajectory,) = read(line, tools=[schema])
    row = state_row(trajectory, states_of(trajectory)[0])
    assert row["topic"] == "x" and row["tools"] == [schema] and row["answer"] == "A"
    assert "verifier" not in row and "outcome" not in row


def test_which_states_are_equal(read):
    lines = [{**LINE, "sample": 0}, {**LINE, "sample": 1}, {**LINE, "sample": 2, "answer": "B"},
             {**LINE, "sample": 3, "topic": "x"}]  # fmt: skip
    _, found = read(*lines)
    keys = [[state_key(state_row(t, state)) for state in states_of(t)] for t in found]
    assert keys[0] == keys[1] and keys[0][0] != keys[0][1]
    assert len({key for some in keys for key in some}) == 6


def with_step(**fields):
    return {**LINE, "steps": [{**LINE["steps"][0], **fields}, LINE["steps"][1]]}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({**LINE, "question_id": -1}, "question_id=-1 must be a number from 0, or a text;"),
        ({**LINE, "question_id": True}, "question_id=True must be"),
        ({**LINE, "sample": "0"}, "sample='0' must be a number from 0;"),
        ({**LINE, "prompt": ""}, "prompt='' must be a text, or a list of messages;"),
        ({**LINE, "prompt": [{"role": "judge", "content": "x"}]}, "prompt[0]={'role': 'judge'"),
        ({**LINE, "steps": []}, "steps=[] must be a list of one step at least;"),
        ({**LINE, "outcome": "yes"}, "outcome='yes' must be true, false or null;"),
        ({**LINE, "truncated": None}, "truncated=None must be true or false;"),
        ({**LINE, "count": 3}, "the column count is a state's own; rename it"),
        ({**LINE, "x": float("nan")}, "has a number that is not finite; correct it"),
        ({**LINE, "x": "\ud800"}, "half of a surrogate pair"),
        (with_step(action=None), "steps[0].action=None must be a text that says something;"),
        (with_step(action=" "), "steps[0].action=' ' must be a text that says something;"),
        (with_step(observation=None), "steps[0].observation=None must be what the next action"),
        (with_step(observation=""), "steps[0].observation='' must be a text that says something,"),
        (with_step(observation=[{"role": "tool"}]), "steps[0].observation[0]={'role': 'tool'}"),
        (with_step(process=0.5), "steps[0].process=0.5 must be 1, 0 or null;"),
        (with_step(note=3), "steps[0].note=3 must be a text;"),
        ({**LINE, "steps": ["look"]}, "steps[0].action=None must be"),
        (
            {**LINE, "steps": [*LINE["steps"][:1], {"action": "A", "observation": "no"}]},
            "steps[1].observation='no' must be null, as it follows the final answer; remove it",
        ),
    ],
)  # fmt: skip
def test_lines_that_are_refused(read, line, said):
    message = refusal(read, LINE, {"sample": 9, **line})
    assert message.startswith("t.jsonl, line 3") and said in message


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({"trajectories": 2}, "trajectories=2 must be 1, the version of the format;"),
        ({"weights": None}, "weights=None must be the digest of the model that sampled;"),
        ({"chat": "yes"}, "chat='yes' must be true or false"),
        ({"ends": ","}, "ends=',' must be a list of texts of one token each;"),
        ({"judge": "me"}, "judge='me' must be an object, or null;"),
        ({"tools": {}}, "tools={} must be a list of JSON schemas, or null;"),
        ({"tags": {"calls": "search"}}, "tags={'calls': 'search'} must be {\"calls\": [names],"),
    ],
)
def test_headers_that_are_refused(read, header, said):
    message = refusal(read, LINE, **header)
    assert message.startswith("t.jsonl, line 1: ") and said in message


def test_files_that_are_refused(read, tmp_path):
    assert "has no trajectories behind its header" in refusal(read)
    twice = refusal(read, LINE, {**LINE, "outcome": False})
    assert "line 3: question_id=7 sample=0 is that of line 2 too; remove one" in twice
    for name, text, said in (
        ("t.jsonl", "", "is no header of trajectories"),
        ("t.jsonl", json.dumps(LINE), "is no header of trajectories"),
        ("t.jsonl", json.dumps(HEADER) + '\n{"question_id"', "line 2 is not JSON"),
        ("t.parquet", "", "must end in .jsonl"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(DataError, match=said):
            read_trajectories(tmp_path / name)
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_trajectories(tmp_path / "none.jsonl")


def test_messages_need_a_chat(read):
    messages = [{"role": "user", "content": "Which?"}]
    said = refusal(read, {**LINE, "prompt": messages}, chat=False, ends=["k"])
    assert "must be a text, since chat=false" in said
    said = refusal(read, with_step(observation=messages), chat=False, ends=["k"])
    assert "steps[0].observation=[{" in said and "must be a text or null, as chat=false" in said


def test_actions_that_nothing_ends_are_refused(read):
    for ends in ([], ["."]):
        header, found = read(LINE, chat=False, ends=ends)
        with pytest.raises(DataError) as caught:
            check_ends(header, found)
        said = str(caught.value)
        assert "line 2: steps[0].action ends with 'look', but an action must end at one" in said
        assert f"the header's ends, {ends}: " in said and "learns to write the observation" in said
    header, found = read(LINE, chat=False, ends=[".", "ok"])
    check_ends(header, found)  # The last action ends at the model's own stop token.
