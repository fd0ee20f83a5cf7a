"""An episode's rows before they become tensors: where its tokens stand, and what each has.

Not exercised: how they travel (tests/parallel/test_exchange.py).
"""

from array import array

from vapo_megatron.data.rollout import Prompt, Rollout, ScoredRollout, Turn


def episode(*ends, inserted=()):
    """Six response tokens, 10 to 15, behind a prompt of two."""
    return Rollout(
        Prompt(0, "", (1, 2), ""), 0, 0, array("i", range(10, 16)), array("f", [0.0] * 6), False, 0,
        inserted=inserted, turns=tuple(Turn(end, 0.0) for end in ends),
    )  # fmt: skip


def test_inserted_tokens_stand_before_the_token_that_they_name():
    found = episode(inserted=((2, array("i", [7, 8])), (6, array("i", [9]))))
    assert found.sequence.tolist() == [1, 2, 10, 11, 7, 8, 12, 13, 14, 15, 9]
    assert found.places.tolist() == [2, 3, 6, 7, 8, 9] and found.num_inserted == 3
    assert found.sequence[found.places].tolist() == found.token_ids.tolist()


def test_each_turn_begins_where_the_one_before_it_ends():
    scored = ScoredRollout(episode(2, 3, 6), "", "wrong", 0.0)
    assert scored.column("turn_starts").tolist() == [1, 0, 1, 1, 0, 0]
    assert scored.own_columns == ("turn_starts",)
    assert ScoredRollout(episode(6), "", "wrong", 0.0).own_columns == ()


def test_the_last_action_is_the_last_turn():
    assert episode(2, 3, 6).last_action.tolist() == [13, 14, 15]
    assert episode(6).last_action.tolist() == episode().last_action.tolist() == [*range(10, 16)]


def test_rewards_of_one_token_add_up():
    earned = ((1, 0.5), (3, 0.25), (1, -2.0))
    scored = ScoredRollout(episode(2, 6), "", "wrong", 1.0, token_rewards=earned)
    assert scored.column("token_rewards").tolist() == [0, -1.5, 0, 0.25, 0, 0]
    assert (scored.earned, scored.total_reward) == (-1.25, -0.25)
