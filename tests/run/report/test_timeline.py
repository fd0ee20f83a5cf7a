"""The report's two lanes, from spans of known length."""

import re

import pytest

from vapo_megatron.config.phases import Span
from vapo_megatron.run.report.timeline import lanes


def row(step, *spans, sampler=()):
    """Spans are (phase, begin, end)."""
    made = [
        [Span(name, step, begin, end) for name, begin, end in side] for side in (spans, sampler)
    ]
    return {"step": step, "trainer": made[0], "sampler": made[1]}


def drawn(html):
    """What stands in which lane: title, and share of the width from where to where."""
    found = re.findall(
        r'<rect x="([\d.]+)" y="(\d+)" width="([\d.]+)" [^>]*><title>([^<]*)</title>', html
    )
    tops = sorted({int(y) for _, y, _, _ in found})
    lanes = {top: [] for top in tops}
    for x, y, width, title in found:
        begin = (float(x) - 70) / 1130
        lanes[int(y)].append((title, begin, begin + float(width) / 1130))
    return list(lanes.values())


def test_colocated_processes_train_and_sample_by_turns():
    html = lanes([row(1, ("generation", 10, 14), ("reward", 14, 15), ("actor_update", 16, 20))])
    trains, samples = drawn(html)
    assert samples == [
        ("generation of step 1, 4.00 s", 0, pytest.approx(0.4, abs=1e-3)),
        ("reward of step 1, 1.00 s", pytest.approx(0.4, abs=1e-3), pytest.approx(0.5, abs=1e-3)),
    ]
    ((title, begin, end),) = trains
    assert title == "actor update of step 1, 4.00 s"
    assert (begin, end) == pytest.approx((0.6, 1.0), abs=1e-3)
    assert "by turns" in html and "step 1<" in html


def test_a_sampler_of_its_own_has_its_lane_from_where_the_trainers_begins():
    sampler = [("generation", 90, 95), ("generation", 99, 103)]
    made = row(2, ("generation", 100, 102), ("critic_update", 102, 110), sampler=sampler)
    # The sampler is a step ahead.
    made["sampler"] = [span._replace(step=3) for span in made["sampler"]]
    trains, samples = drawn(lanes([made]))
    assert [title for title, *_ in trains] == [
        "generation of step 2, 2.00 s", "critic update of step 2, 8.00 s",
    ]  # fmt: skip
    assert samples == [("generation of step 3, 4.00 s", 0, pytest.approx(0.3, abs=1e-3))]


def test_only_the_last_steps_since_an_interruption_are_shown():
    steps = [row(k, ("actor_update", 10 * k, 10 * k + 9)) for k in range(1, 9)]
    assert re.findall(r"step (\d)<", lanes(steps)) == ["5", "6", "7", "8"]
    resumed = [
        *steps, row(9, ("actor_update", 500, 509)), row(10, ("actor_update", 510, 519)),
    ]  # fmt: skip
    assert re.findall(r">step (\d+)<", lanes(resumed)) == ["9", "10"]


def test_without_spans_there_is_no_section():
    assert lanes([]) == lanes([row(0)]) == ""
