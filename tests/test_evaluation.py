"""Judging problems over replicas, votes by the verifier, and the file of an evaluation.

The sampler is a stand-in whose responses depend on problem and sample; processes, collectives and
the verifier are real. Not exercised: vLLM (tests/e2e/test_evaluate.py).
"""

import json

import pytest

from vapo_megatron.batch import Prompt, Rollout
from vapo_megatron.config import EvaluationConfig, RolloutConfig, VapoConfig
from vapo_megatron.errors import DataError
from vapo_megatron.evaluation_file import EvaluationFile, weights_digest
from vapo_megatron.evaluation_statistics import majority_at_k, problem_values
from vapo_megatron.reward.math_verifier import MathVerifier

SAMPLES = 4


class Sampler:
    """Responses of a replica: right where problem + sample is divisible by 3."""

    def __init__(self, replica, num_replicas):
        self._place = replica, num_replicas

    def generate(self, prompts, group_size, step, sampling, version, on_progress=None):
        from vapo_megatron.rollout.requests import assign

        replica, num_replicas = self._place
        made = []
        for position in assign(len(prompts), num_replicas)[replica]:
            prompt, sample = prompts[position], position % group_size
            right = (prompt.index + sample) % 3 == 0
            text = f"Answer: {prompt.answer if right else 100 + sample % 2}"
            if sample == 3:
                text = "no idea"
            ids = (5,) * (1 + prompt.index + sample)
            truncated = len(ids) > 6
            logprobs = (0.0,) * len(ids)
            made.append(Rollout(prompt, sample, position, ids, logprobs, truncated, text, version))
            if on_progress:
                on_progress(len(made), len(made))
        return made


def problems(count):
    return [Prompt(i, f"problem {i}", (1, 2), str(i)) for i in range(count)]


def judged_on(replicas_of, count):
    """Worker: what judge_problems and evaluate give; every replicas_of ranks form a replica."""
    import torch.distributed as dist

    from vapo_megatron.evaluation import evaluate, judge_problems

    config = VapoConfig(
        evaluation=EvaluationConfig(samples=SAMPLES), rollout=RolloutConfig(max_response_tokens=99)
    )
    rank, size = dist.get_rank(), dist.get_world_size()
    sampler = Sampler(rank // replicas_of, size // replicas_of)
    verifier = MathVerifier(1, 60) if rank % replicas_of == 0 else None
    judged = judge_problems(
        sampler, verifier, config, problems(count), policy_version=0, keep_text=True
    )
    metrics = evaluate(sampler, verifier, config, problems(count), policy_version=0)
    if verifier is not None:
        verifier.close()
    return judged, metrics


def test_neither_replicas_nor_ranks_change_the_result(workers):
    # 5 problems of 4 samples: 20 positions, of which two replicas cut the middle group.
    results = {key: workers.run(key[0], judged_on, key[1], 5) for key in ((1, 1), (2, 1), (2, 2))}
    [(judged, metrics)] = results[1, 1]
    for ranks in results.values():
        assert ranks[0][0] == judged and all(r[0] is None for r in ranks[1:])
        assert all(r[1] == metrics for r in ranks)
    assert [[r["status"] for r in p] for p in judged[:2]] == [
        ["correct", "wrong", "wrong", "unparsable"],
        ["wrong", "wrong", "correct", "unparsable"],
    ]
    assert judged[0][1] == {
        "sample": 1, "status": "wrong", "answer": "101", "vote": 1, "num_tokens": 2,
        "truncated": False, "text": "Answer: 101",
    }  # fmt: skip
    # One of the first three samples of each problem is right, the last has no answer:
    # avg 1/4, pass 1, and three answers with a vote each; problem 1 answers 100, 101, 1.
    assert metrics["evaluation/avg@4"] == 1 / 4
    assert metrics["evaluation/pass@4"] == 1.0
    # Problem p is right at sample -p mod 3: 0, 2, 1, 0, 2. The others say 100 + sample % 2: where
    # sample 1 is right, samples 0 and 2 say 100 twice and win (0); else all have one vote (1/3).
    assert metrics["evaluation/majority@4"] == pytest.approx((4 / 3 + 0) / 5)
    # Lengths 1 + p + s: mean 1 + 2 + 1.5.
    assert metrics["evaluation/response_length_mean"] == 4.5
    # Longer than 6: p + s > 5, of p in 0..4 and s in 0..3: (3,3), (4,2), (4,3).
    assert metrics["evaluation/truncated_fraction"] == 3 / 20


@pytest.fixture(scope="module")
def verifier():
    with MathVerifier(num_workers=1, timeout_seconds=60) as shared:
        yield shared


def votes_of(verifier, *answers):
    """Votes of responses given as (status, answer)."""
    from vapo_megatron.evaluation import count_votes

    names = {"c": "correct", "w": "wrong", "u": "unparsable", "t": "timed_out"}
    judged = [{"status": names[s], "answer": a} for s, a in answers]
    return count_votes(verifier, [judged])[0]


@pytest.mark.parametrize(
    ("answers", "votes"),
    [
        # Equal values are one class, whatever their texts: 3 to 3.
        (
            [("c", "3"), ("w", "1/2"), ("c", "3.0"), ("w", "0.5"), ("c", "6/2"),
             ("w", "\\frac{1}{2}")],
            [0, 1, 0, 1, 0, 1],
        ),
        ([("w", "5"), ("c", "3"), ("w", "05"), ("w", "7"), ("c", "3")], [0, 1, 0, 2, 1]),
        # No answer, no vote.
        ([("u", None), ("c", "3"), ("w", "4"), ("u", None)], [None, 0, 1, None]),
        # What could not be judged is its text, and is compared with nothing.
        (
            [("t", "9^{9^{9^{9}}}"), ("c", "3"), ("t", "9^{9^{9^{9}}}"), ("c", "3"),
             ("u", "of no value"), ("u", "of no value")],
            [0, 1, 0, 1, 2, 2],
        ),
        # Solutions are the same in any order; one of them alone is another answer.
        ([("w", "1, 2"), ("c", "3"), ("w", "2, 1"), ("c", "3"), ("w", "2")], [0, 1, 0, 1, 2]),
    ],
)  # fmt: skip
def test_votes(verifier, answers, votes):
    assert votes_of(verifier, *answers) == votes


class Unasked:
    """A verifier that must not be asked anything."""

    def unparsable_answers(self, answers):
        assert not answers
        return []

    def score(self, texts, answers):
        assert not texts
        return []


@pytest.mark.parametrize(
    "answers",
    [
        # 3 correct, 2 others; 1 correct, one answer thrice; none correct.
        [("c", "3"), ("c", "3"), ("c", "3"), ("w", "1/2"), ("w", "0.5")],
        [("c", "3"), ("w", "4"), ("w", "4"), ("w", "0.5"), ("w", "1/2")],
        [("w", "1/2"), ("w", "0.5"), ("u", None)],
    ],
)
def test_nothing_is_compared_where_it_cannot_change_the_majority(answers):
    correct = [status == "c" for status, _ in answers]
    votes = votes_of(Unasked(), *answers)
    assert majority_at_k(votes, correct) == (1.0 if sum(correct) == 3 else 0.0)


HEADER = {"checkpoint": "here", "weights": "w", "data": "there", "samples": 2, "seed": 0}


def line(index, statuses=("correct", "wrong")):
    responses = [
        {"sample": i, "status": s, "answer": "1", "vote": i, "num_tokens": 3, "truncated": False,
         "text": "t\u00e9\n"}
        for i, s in enumerate(statuses)
    ]  # fmt: skip
    return {"prompt_index": index, "prompt": "p", "answer": "1", "responses": responses}


def test_a_file_goes_on_where_it_was_cut_at_any_byte(tmp_path):
    whole = tmp_path / "deep" / "whole.jsonl"
    with EvaluationFile(whole, HEADER) as file:
        file.append([line(0), line(1)])
        file.append([line(2)])
    content = whole.read_bytes()
    header, *lines = [json.loads(text) for text in content.splitlines()]
    assert header == {"evaluation": 1, **HEADER} and lines == [line(i) for i in range(3)]
    values = problem_values(line(0)["responses"])
    ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    for cut in {0, 1, *ends, *(e - 1 for e in ends), *(e + 5 for e in ends[:-1])}:
        path = tmp_path / f"{cut}.jsonl"
        path.write_bytes(content[:cut])
        with EvaluationFile(path, HEADER) as file:
            complete = max(0, sum(e <= cut for e in ends) - 1)
            assert file.values == {i: values for i in range(complete)}
            file.append([line(i) for i in range(complete, 3)])
        assert path.read_bytes() == content, cut


def test_another_evaluation_is_refused_but_not_another_place(tmp_path):
    path = tmp_path / "a.jsonl"
    EvaluationFile(path, HEADER).close()
    EvaluationFile(path, {**HEADER, "checkpoint": "moved", "data": "moved"}).close()
    for name, value in (("weights", "x"), ("samples", 3), ("seed", 1), ("top_p", 0.7)):
        with pytest.raises(
            DataError, match=f"another evaluation: its {name} is .* {value!r}; give another --out"
        ):
            EvaluationFile(path, {**HEADER, name: value})
    assert len(path.read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "p"}\n', "is no evaluation's file; give another --out"),
        ("something important", "is no evaluation's file"),
        ("nonsense\n", "line 1 is not as an evaluation writes it"),
        ("HEADER[1]\n", "line 2 is not as"),
        ('HEADER{"prompt_index": 1}\n', "line 2 is not as"),
    ],
)
def test_foreign_files_are_left_alone(tmp_path, text, message):
    path = tmp_path / "a.jsonl"
    text = text.replace("HEADER", json.dumps({"evaluation": 1, **HEADER}) + "\n")
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        EvaluationFile(path, HEADER)
    assert path.read_text() == text


def test_two_at_once_are_refused(tmp_path):
    with EvaluationFile(tmp_path / "a.jsonl", HEADER):
        with pytest.raises(DataError, match="being written by another evaluation"):
            EvaluationFile(tmp_path / "a.jsonl", HEADER)
    EvaluationFile(tmp_path / "a.jsonl", HEADER).close()


def test_weights_are_told_apart_by_content(tmp_path):
    files = {"model.safetensors": bytes(5_000_000), "config.json": b"{}", "README.md": b"x"}
    for copy in ("a", "b"):
        (tmp_path / copy).mkdir()
        for name, content in files.items():
            (tmp_path / copy / name).write_bytes(content)
    first, second = tmp_path / "a", tmp_path / "b"
    assert weights_digest(first) == weights_digest(second)
    (second / "README.md").write_bytes(b"y")
    assert weights_digest(first) == weights_digest(second)
    for name, content in (
        ("config.json", b"{ }"),
        ("model.safetensors", bytes(5_000_001)),
        ("model.safetensors", b"\1" * 5_000_000),
        ("other.safetensors", b""),
    ):
        before = (second / name).read_bytes() if (second / name).exists() else None
        (second / name).write_bytes(content)
        assert weights_digest(first) != weights_digest(second), name
        (second / name).unlink() if before is None else (second / name).write_bytes(before)
