"""`vapo evaluate` of responses that have begun: their rest, and whether it reflects.

A greedy response that is cut and given as a beginning goes on as it did. Not exercised: a GPU.
"""

import json
from pathlib import Path

import pytest

from tests import jsonl
from tests.e2e.test_evaluate import OPTIONS, checkpoint, data, read
from tests.e2e.test_run import ended
from vapo_megatron.cli.evaluate import command as evaluate

__all__ = ["checkpoint", "data"]

GREEDY = ["--samples", "1", "--temperature", "0"]


def evaluate_twice(out, given):
    """Greedily, and again from the middle of what that has written."""
    whole, cut, second = (Path(out) / name for name in ("whole.jsonl", "cut.jsonl", "rest.jsonl"))
    code = evaluate.main([*given, "--out", str(whole), *GREEDY])
    rows = []
    for line in read(whole)[1]:
        words = line["responses"][0]["text"].replace("\\boxed", " \\boxed").split()
        begun = " ".join(words[:5])
        task = "odd" if line["prompt_index"] % 2 else "even"
        rows.append(
            {"prompt": line["prompt"], "answer": line["answer"], "begun": begun, "task": task}
        )
    jsonl.write(cut, rows)
    given = [*given[:2], "--data", str(cut), *given[4:]]
    probe = ["--prefix-column", "begun", "--reflects-words", "{3},{4}"]
    return code or evaluate.main([*given, "--out", str(second), *GREEDY, *probe])


@pytest.fixture(scope="module")
def found(launch, checkpoint, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    given = ["--checkpoint", str(checkpoint), "--data", str(data), *OPTIONS]
    return out, ended(launch(evaluate_twice, str(out), given)).stdout


def test_the_rest_is_that_of_the_whole(found):
    out, _ = found
    rows = jsonl.read(out / "cut.jsonl")
    wholes, rests = (read(out / f"{name}.jsonl")[1] for name in ("whole", "rest"))
    assert len(rests) == len(rows) > 5
    for row, whole, rest in zip(rows, wholes, rests, strict=True):
        text = whole["responses"][0]["text"]
        begun = row["begun"].replace(" ", "")
        assert begun and text.startswith(begun), "the beginning is of whole tokens"
        again = begun + rest["responses"][0]["text"]
        # It has as many tokens as it may, and so more than the whole had.
        assert again.startswith(text) and len(again) > len(text)


def test_each_says_whether_it_reflects(found):
    out, printed = found
    header, rests = read(out / "rest.jsonl")
    assert header["probe"]["prefix_column"] == "begun"
    for line in rests:
        (response,) = line["responses"]
        assert response["reflects"] == any(w in response["text"] for w in header["probe"]["words"])


def test_the_metrics_are_those_of_the_samples(found):
    out, printed = found
    _, rests = read(out / "rest.jsonl")
    written = json.loads((out / "rest.json").read_text())["reflection"]
    assert written.keys() == {"all", "task even", "task odd"}
    for name, some in (("all", rests), ("task even", rests[::2]), ("task odd", rests[1::2])):
        responses = [line["responses"][0] for line in some]
        metrics = written[name]["metrics"]
        shares = {
            "accuracy": [r["status"] == "correct" for r in responses],
            "reflection": [r["reflects"] for r in responses],
            "accurate_explicit": [r["status"] == "correct" and r["reflects"] for r in responses],
        }
        for metric, values in shares.items():
            assert metrics[metric]["value"] == pytest.approx(sum(values) / len(values))
        assert written[name]["num_samples"] == len(some) and written[name]["num_unclear"] == 0
    assert "reflection, by the words {3}, {4}" in printed and "task odd" in printed
