"""The metrics of reflection and their intervals, against the authors' tables and a plain loop.

Not exercised: where samples and their verdicts come from.
"""

import json

import numpy as np
import pytest

from vapo_megatron.rollout.evaluation.reflection import (
    Reflection,
    Sample,
    phi,
    reflection,
    reflection_by_task,
)

NAMES = ["accuracy", "reflection", "accurate_explicit", "accurate_implicit", "correlation"]
MIXED = [(1, 1)] * 3 + [(1, 0)] + [(0, 1)] * 5 + [(0, 0)] * 11


def problems(pairs):
    """Of one sample each."""
    return [[Sample(bool(c), None if e is None else bool(e))] for c, e in pairs]


def values(found):
    return [None if found.metrics[n] is None else found.metrics[n].value for n in NAMES]


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        (MIXED, [0.2, 0.4, 0.15, 0.05, 0.357217254156]),
        ([(0, 1)] * 4 + [(0, 0)] * 6, [0, 0.4, 0, 0, None]),
        ([(1, 1)] * 2 + [(0, 1)] * 8, [0.2, 1, 0.2, 0, None]),
        ([(1, 1)] * 2 + [(0, 0)] * 8, [0.2, 0.2, 0.2, 0, 1]),
        ([(1, 0)] * 5 + [(0, 1)] * 5, [0.5, 0.5, 0, 0.5, -1]),
    ],
    ids=["mixed", "none_correct", "all_reflect", "same", "opposite"],
)
def test_metrics(pairs, expected):
    found = reflection(problems(pairs), seed=0)
    assert list(found.metrics) == NAMES
    for value, right in zip(values(found), expected, strict=True):
        assert value is right if right is None else value == pytest.approx(right, abs=1e-12)
    accuracy, _, explicit, implicit, correlation = values(found)
    assert accuracy == pytest.approx(explicit + implicit, abs=1e-15)
    if correlation is not None:
        c, e = np.array(pairs).T
        assert correlation == pytest.approx(np.corrcoef(c, e)[0, 1], abs=1e-12)
    assert (found.num_problems, found.num_samples, found.num_unclear) == (len(pairs),) * 2 + (0,)


def test_samples_of_a_problem_are_averaged_first():
    # c: (1/2 + 0)/2, not 1/3; e: (1 + 0)/2; both: (1/2 + 0)/2.
    given = [[Sample(True, True), Sample(False, True)], [Sample(False, False)]]
    found = reflection(given, seed=0)
    assert values(found)[:4] == [0.25, 0.5, 0.25, 0]
    assert values(found)[4] == pytest.approx((0.25 - 0.125) / (0.25 * 0.75 * 0.5 * 0.5) ** 0.5)


def test_what_is_unclear_is_counted_apart():
    unclear = problems([*MIXED, (1, None), (0, None)])
    unclear[0] = [*unclear[0], Sample(False, None)]
    found = reflection(unclear, seed=0)
    assert values(found) == values(reflection(problems(MIXED), seed=0))
    assert (found.num_problems, found.num_samples, found.num_unclear) == (20, 20, 3)
    nothing = reflection(problems([(1, None)]), seed=0)
    assert nothing == Reflection(0, 0, 1, dict.fromkeys(NAMES))


def test_intervals_are_those_of_a_plain_loop():
    drawn = np.random.RandomState(3)
    given = [
        [Sample(bool(drawn.randint(2)), bool(drawn.randint(2))) for _ in range(1 + i % 3)]
        for i in range(12)
    ]
    found = reflection(given, seed=5)
    generator = np.random.RandomState(5)
    means = np.array([
        [
            np.mean([s.is_correct for s in some]), np.mean([s.reflects for s in some]),
            np.mean([s.is_correct and s.reflects for s in some]),
            np.mean([s.is_correct and not s.reflects for s in some]),
        ]
        for some in given
    ])  # fmt: skip
    resampled = np.array([means[generator.randint(0, 12, 12)].mean(0) for _ in range(10_000)])
    c, e, both, _ = resampled.T
    has_value = (c * (1 - c) * e * (1 - e)) > 0
    c, e, both = c[has_value], e[has_value], both[has_value]
    correlations = (both - c * e) / np.sqrt(c * (1 - c) * e * (1 - e))
    for name, of_name in zip(NAMES, [*resampled.T, correlations], strict=True):
        low, high = np.percentile(of_name, [2.5, 97.5])
        assert found.metrics[name].low == pytest.approx(low, abs=1e-12)
        assert found.metrics[name].high == pytest.approx(high, abs=1e-12)
        assert low < found.metrics[name].value < high


def test_resamples_without_a_correlation_are_left_out():
    # One of four is right: 0.75^4 = 0.32 of the resamples have none.
    found = reflection(problems([(1, 1), (0, 1), (0, 0), (0, 0)]), seed=0)
    correlation = found.metrics["correlation"]
    assert correlation.value == pytest.approx(3**-0.5)
    assert 0 < correlation.low < correlation.value < correlation.high <= 1


def test_intervals_that_would_have_no_width():
    same = reflection(problems([(1, 1)] * 3 + [(0, 0)] * 5), seed=0).metrics["correlation"]
    assert (same.value, same.low, same.high) == (1, None, None)
    one = reflection([[Sample(True, True), Sample(False, False)]], seed=0).metrics
    assert [(e.low, e.high) for e in one.values()] == [(None, None)] * 5
    assert one["correlation"].value == 1
    # Wilson's, as for every share.
    none = reflection(problems([(0, 1)] * 30), seed=0).metrics["accuracy"]
    assert none.high == pytest.approx(0.114, abs=5e-4)


def test_by_task():
    others = problems([(0, 1), (0, 0)])
    given = [*problems(MIXED), *others, *problems([(1, 1)])]
    tasks = [*["self"] * 20, "gsm8k_adv", "gsm8k_adv", None]
    found = reflection_by_task(given, tasks, seed=0)
    assert list(found) == ["gsm8k_adv", "self"]
    assert found["self"] == reflection(problems(MIXED), seed=0)
    assert found["gsm8k_adv"] == reflection(others, seed=0)
    assert reflection_by_task([], [], seed=0) == {}


def test_json():
    written = json.loads(json.dumps(reflection(problems([(0, 1)] * 2), seed=0).as_json()))
    assert written["metrics"]["reflection"]["value"] == 1
    assert written["metrics"]["correlation"] is None and written["num_samples"] == 2


def test_phi_has_no_value_where_a_share_is_whole():
    assert phi(0, 0.5, 0) is phi(1, 0.5, 0.5) is phi(0.5, 0, 0) is phi(0.5, 1, 0.5) is None
    assert phi(0.5, 0.5, 0.25) == 0
