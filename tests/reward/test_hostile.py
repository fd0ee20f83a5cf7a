"""Thousands of hostile responses, through real workers: nothing crashes, hangs or is correct.

Not exercised: what one bad answer does to the others' time (test_math_verifier.py).
"""

import os
import resource

import psutil
import pytest

from tests.reward.hostile import GOLDS, KINDS, hostile_responses
from vapo_megatron.reward.extraction import final_answer
from vapo_megatron.reward.math_verifier import MathVerifier

MEMORY_LIMIT = 400 << 20
# Right answers between the hostile ones, that take a worker.
PROBES = (("Answer: 6/14", "3/7"), (r"\boxed{\sqrt{12}}", r"2\sqrt{3}"), ("#### 50%", "1/2"))


def judged(corpus, limit_seconds):
    """The corpus with probes in it, judged -> its statuses, after what must hold of any corpus."""
    responses, golds, probes = [], [], []
    for i, (_, response, gold) in enumerate(corpus):
        if i % 40 == 0:
            probes.append(len(responses))
            responses.append(PROBES[i // 40 % len(PROBES)][0])
            golds.append(PROBES[i // 40 % len(PROBES)][1])
        responses.append(response)
        golds.append(gold)
    own_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with MathVerifier(2, limit_seconds, MEMORY_LIMIT) as verifier:
        verdicts = verifier.score(responses, golds)
        workers = verifier.process_ids
        for process_id in workers:
            bound, _ = psutil.Process(process_id).rlimit(psutil.RLIMIT_AS)
            while_it_starts = bound == psutil.RLIM_INFINITY
            assert while_it_starts or MEMORY_LIMIT < bound < MEMORY_LIMIT + (1 << 30)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - own_peak < 64 << 10  # KiB
    assert not any(map(psutil.pid_exists, workers))
    assert [verdicts[i].status for i in probes] == ["correct"] * len(probes)
    hostile = [verdict for i, verdict in enumerate(verdicts) if i not in set(probes)]
    correct = [item for item, verdict in zip(corpus, hostile) if verdict.is_correct]
    assert correct == []
    assert os.listdir() == []  # no CANARY, no core dump
    return [verdict.status for verdict in hostile]


def test_a_sample_of_the_corpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    corpus = hostile_responses(60)[1:]  # without the costly one
    assert {kind for kind, _, _ in corpus} == {kind.__name__.strip("_") for kind in KINDS}
    statuses = judged(corpus, 60)
    assert {"wrong", "unparsable"} <= set(statuses)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_corpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    corpus = hostile_responses(2400)
    statuses = judged(corpus, 5.0)
    for (kind, response, _), status in zip(corpus, statuses):
        # Too much work or memory is that, and never a wrong answer.
        assert kind not in ("endless", "filling") or status == "timed_out", response


def test_the_corpus_is_large_hostile_and_the_same_each_time():
    corpus = hostile_responses(2400)
    assert corpus == hostile_responses(2400) != hostile_responses(2400, seed=1)
    responses = [response for _, response, _ in corpus]
    assert len(set(responses)) == 2400
    assert sum(len(response) > 10**6 for response in responses) >= 3
    for kind in KINDS:
        assert sum(name == kind.__name__.strip("_") for name, _, _ in corpus) >= 100
    # Without the marks of a final answer it would test nothing behind them.
    with_answer = [response for response in responses if final_answer(response) is not None]
    assert 0.7 < len(with_answer) / len(responses) < 0.95
    assert {gold for _, _, gold in corpus} >= set(GOLDS)
