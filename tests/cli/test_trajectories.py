"""What `vapo trajectories` refuses in one line, and what a response becomes; no engine.

Not exercised here: sampling (tests/e2e/test_trajectories.py).
"""

from pathlib import Path

import pytest

from tests import jsonl
from tests.weights.tiny_hf import write_tiny_model
from vapo_megatron.cli.sampling.inputs import check, evaluation_config
from vapo_megatron.cli.trajectories import command
from vapo_megatron.cli.trajectories.episodes import trajectory
from vapo_megatron.cli.trajectories.revise import RESPONSE, _read, prepare
from vapo_megatron.errors import DataError
from vapo_megatron.rollout.revision import Settings


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """The options of a checkpoint and two rows."""
    root = tmp_path_factory.mktemp("given")
    write_tiny_model(root / "model", num_layers=1, heads=2, kv_heads=2, vocab=64)
    data = root / "data.jsonl"
    jsonl.write(data, ({"prompt": "12", "answer": "3"} for _ in range(2)))
    out = str(root / "out.jsonl")
    return ["--checkpoint", str(root / "model"), "--data", str(data), "--out", out]


def refused(capsys, *arguments):
    assert command.main(list(arguments)) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("trajectories:")]
    return line


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--out", "x.parquet"], "--out=x.parquet must end in .jsonl; change it"),
        (["--revise", "s.jsonl", "--samples", "3"], "--samples=3 is for episodes"),
        (["--gamma", "0"], "--gamma=0 must be in (0, 1]; change it"),
        (["--nproc", "0"], "--nproc=0 must be at least 1"),
        (["--endings", "0"], "--endings=0 must be at least 1; change it"),
        (["--keywords", " ,"], "must be one word or more; change it"),
        (["--separator", "("], "--separator=( is no regular expression"),
        (["--max-switches", "0"], "--max-switches=0 must be at least 1"),
        ([], "environment.use=null and environment.tools=[]: trajectories are episodes"),
        (["--revise", "none.jsonl"], "samples file none.jsonl does not exist"),
        (
            ["--revise", "none.jsonl", "environment.tools=[calculator]"],
            "no chat template that tells the policy of them",
        ),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_are_one_line(given, capsys, more, says):
    assert says in refused(capsys, *given, *more)


@pytest.fixture
def evaluation(given):
    checkpoint, data = (given[given.index(f"--{name}") + 1] for name in ("checkpoint", "data"))
    config = evaluation_config(Path(checkpoint), ["reward.verifier=math"], None)
    return check(Path(checkpoint), Path(data), config), config


def samples(path, evaluation, *, count=2, **changes):
    """A file of a sample for each problem."""
    lines = [{"evaluation": 1, **evaluation.header, "samples": 1, **changes}]
    response = {"sample": 0, "status": "correct", "truncated": False, "text": "w9 w4"}
    lines += [
        {"prompt_index": i, "answer": "3", "verifier": "math", "responses": [response]}
        for i in range(count)
    ]
    jsonl.write(path, lines)
    return path


def test_samples_of_another_model_or_other_data_are_refused(evaluation, tmp_path):
    checked, config = evaluation
    for name in ("weights", "problems"):
        path = samples(tmp_path / "s.jsonl", checked, **{name: "other"})
        with pytest.raises(DataError, match=f"its {name} is 'other', here it is"):
            prepare(checked, config, path, Settings(), endings=2)
    prepare(checked, config, samples(tmp_path / "s.jsonl", checked), Settings(), endings=2)


@pytest.mark.parametrize("text", ["", "{}\n", "[]\n", "no json\n", '{"evaluation": 1}\n[]\n'])
def test_what_is_no_file_of_samples_is_refused(evaluation, tmp_path, text):
    path = tmp_path / "s.jsonl"
    path.write_text(text)
    with pytest.raises(
        DataError, match=r"is not an evaluation's file|was not written by|is of another|JSON"
    ) as caught:
        _read(path, evaluation[0])
    assert "\n" not in str(caught.value)


def test_an_unfinished_file_is_refused(evaluation, tmp_path):
    path = samples(tmp_path / "s.jsonl", evaluation[0], count=1)
    with pytest.raises(DataError, match=r"lacks 1 problems, the first 1 \(from 0\)"):
        _read(path, evaluation[0])


def test_other_settings_are_another_revision(evaluation, tmp_path):
    checked, config = evaluation
    path = samples(tmp_path / "s.jsonl", checked)
    headers = [
        prepare(checked, config, path, settings, endings=endings).header
        for settings, endings in (
            (Settings(), 2), (Settings(), 3), (Settings(gamma=0.5), 2), (Settings(("But",)), 2),
        )
    ]  # fmt: skip
    assert all(one != other for i, one in enumerate(headers) for other in headers[:i])
    assert headers[0]["samples"] == 1, "as many as are revised"


def test_a_text_without_tokens_is_encoded_once_with_its_stop_token(evaluation, tmp_path):
    checked, _ = evaluation
    _, traces = _read(samples(tmp_path / "s.jsonl", checked), checked)
    (one,) = traces[1]
    *ids, stop = one.token_ids
    assert checked.inputs.tokenizer.decode(ids) == "w9w4" and stop in checked.inputs.stop_token_ids
    assert one.place.endswith("problem 1, sample 0") and RESPONSE == "response"


def test_a_responses_turns_become_steps():
    turns = [
        {"action": "a</s>", "observation": "b", "reward": 0.0, "end": 2},
        {"action": "c", "observation": "", "reward": 0.0, "end": 3},
    ]
    response = {
        "sample": 1, "status": "wrong", "truncated": True, "begin": "q", "turns": turns,
        "note": "cut",
    }  # fmt: skip
    line = {"prompt_index": 4, "answer": "7"}
    found = trajectory(line, response, {"kind": "k"})
    assert found.pop("steps") == [
        {"action": "a</s>", "observation": "b", "process": None, "note": ""},
        {"action": "c", "observation": None, "process": None, "note": "cut"},
    ]
    assert found == {
        "kind": "k", "question_id": 4, "sample": 1, "prompt": "q", "answer": "7",
        "outcome": False, "truncated": True,
    }  # fmt: skip
    assert trajectory(line, response, {"question_id": "q7"})["question_id"] == "q7"
