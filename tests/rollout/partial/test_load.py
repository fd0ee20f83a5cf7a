"""Groups in flight of several replicas, kept in a checkpoint and loaded by other replicas."""

import dataclasses
from array import array

import pytest

from tests.rollout.test_partial import Replicas
from vapo_megatron.data.rollout import ScoredRollout
from vapo_megatron.rollout.partial.files import Group, Response, packed, unpacked, write_files
from vapo_megatron.rollout.requests import start_groups


def groups(prompts, started):
    """One group of two for each prompt, by the steps in which they were started."""
    twice = [p for p in prompts for _ in range(2)]
    requests = start_groups(twice, [2] * len(prompts), seed=5, step=0, role="train")
    return [
        Group(step, tuple(Response(r.rollout, r.seed) for r in group))
        for step, group in zip(started, requests, strict=True)
    ]


def test_those_of_one_file_may_be_older_than_those_of_the_file_before_it(tmp_path):
    run = Replicas(1, 4, 2, 3, 9)
    first, second = run.data[0].next(2), run.data[0].next(2)
    held = groups(first, [1, 2]), groups(second, [0, 1])
    for replica, some in enumerate(held):
        name = f"in_flight/carried/replica_{replica:05d}.safetensors"
        write_files(tmp_path, [(name, packed(some, 3))])
    run.load(3, run.data[0].state_dict(), tmp_path)
    found = run.each[0]._after[3].groups
    assert [group.started for group in found] == [0, 1, 1, 2]
    assert sorted(found, key=lambda g: g.started) == sorted(
        [*held[0], *held[1]], key=lambda g: g.started
    )
    scored, left = run.step(3)
    handed = [s.rollout.prompt.index for s in sorted(scored, key=lambda s: s.rollout.position)]
    # Who was started at 0 is due.
    assert handed[0] == second[0].index and len(handed) == 8 and len(left) == 2


@pytest.mark.parametrize("keeps", [True, False])
def test_a_verdict_is_kept_with_all_that_it_says(tmp_path, keeps):
    """On the rank that judges, and with the step in which its group was started."""
    run = Replicas(1, 4, 2, 3, 9)
    (group,) = groups(run.data[0].next(1), [2])
    first, second = group.responses
    sampled = array("i", [5, 6]), array("f", [-0.5, -1.0])
    whole = first.rollout.extended(*sampled, 3, truncated=True)
    verdict = ScoredRollout(
        whole, "text", "wrong", -0.5, score=0.25, note="\u4e03", metrics={"letters": 4.0}
    )
    held = Group(2, (Response(whole, first.seed, True, verdict), second))
    (tmp_path / "file").write_bytes(packed([held], 3))
    (found,) = unpacked(tmp_path / "file", run.data[0].prompt, keeps=keeps)
    expected = held.responses[0] if keeps else dataclasses.replace(held.responses[0], scored=None)
    assert found == Group(2, (expected, second))
