"""Rounds of one step that replicas share: each round's groups are taken from its own queue."""

from tests.rollout.test_work import Noting
from vapo_megatron.data.rollout import Prompt
from vapo_megatron.rollout.requests import SamplingSettings
from vapo_megatron.rollout.work import generate


class Few(Noting):
    """Has room for two groups of two, so that the others are taken from the queue."""

    at_once = 4


def test_each_round_and_step_has_all_its_groups():
    prompts = [Prompt(i // 2, "", (3,), "") for i in range(16)]
    engine, found = Few(0, 1), []
    for step, number in ((1, 0), (1, 1), (1, 2), (2, 0)):
        settings = SamplingSettings(1.0, 1.0, -1, 9, "train", shared=True, round=number)
        found.append(generate(engine, prompts, [2] * 8, step, settings, 0))
    assert [[r.position for r in some] for some in found] == [list(range(16))] * 4
    assert len({tuple(tuple(r.token_ids) for r in some) for some in found}) == 4
