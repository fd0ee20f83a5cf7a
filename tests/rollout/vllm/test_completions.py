"""What vLLM is asked for a response that goes on. Real engines: test_turns.py, test_partial.py."""

from array import array

import pytest

from vapo_megatron.data.rollout import Prompt, Rollout
from vapo_megatron.rollout.requests import Request, SamplingSettings, continued_seed
from vapo_megatron.rollout.vllm.completions import request

SAMPLING = SamplingSettings(1.0, 1.0, -1, 20, "rollout")
SEED = 11


def asked(num_tokens, inserted=(), most=None):
    rollout = Rollout(
        Prompt(0, "", (1, 2), ""), 0, 0, array("i", [5] * num_tokens),
        array("f", [0.0] * num_tokens), False, 0, inserted=inserted,
    )  # fmt: skip
    return request(SAMPLING, [2], Request(rollout, SEED, most))


def test_each_turn_has_random_numbers_of_its_own():
    """The same ones again would sample a turn after the same tokens as the turn before it."""
    seeds = [asked(n).seed for n in (0, 3, 6)]
    assert seeds == [SEED, continued_seed(SEED, 3), continued_seed(SEED, 6)]
    assert len(set(seeds)) == 3
    assert asked(3, inserted=((3, array("i", [7, 8])),)).seed == seeds[1]


@pytest.mark.parametrize(("most", "left"), [(None, 15), (4, 4), (18, 15)])
def test_inserted_tokens_count_towards_the_longest_response(most, left):
    assert asked(3, ((3, array("i", [7, 8])),), most).max_tokens == left
