"""The order of prompts: seeded, epoch by epoch, resumable, the same for every layout.

Not exercised: real tokenizers (a character here is a token).
"""

import json

import numpy as np
import pytest

from vapo_megatron.data.order import mix, seeded_permutation
from vapo_megatron.data.prompts import Problem, PromptDataset
from vapo_megatron.errors import DataError


def tokenize(text):
    return [ord(character) for character in text]


def dataset_of(problems, tokenize=tokenize, **changed):
    kept = {"path": "a.jsonl", "seed": 0, "shuffle": True, "max_prompt_tokens": 99}
    return PromptDataset(problems, tokenize, **{**kept, **changed})


def make(count=10, **changed):
    return dataset_of([Problem(f"problem {i}", str(i)) for i in range(count)], **changed)


def indices(prompts):
    return [prompt.index for prompt in prompts]


def test_the_hash_is_splitmix64():
    # The first output of the published generator from state 0.
    assert int(mix(np.zeros(1, np.uint64))[0]) == 0xE220A8397B1DCDAF


def test_orders_never_change():
    # Golden: stored runs resume in this order.
    assert seeded_permutation(10, 0, 1, 0) == [3, 4, 2, 6, 0, 7, 8, 1, 9, 5]


def test_orders_are_permutations_and_differ_by_key():
    assert seeded_permutation(0, 5) == [] and seeded_permutation(1, 5) == [0]
    keys = ((0,), (1,), (0, 0), (0, 1), (1, 0), (-1,), (2**63,))
    orders = [seeded_permutation(100, *key) for key in keys]
    assert all(sorted(order) == list(range(100)) for order in orders)
    assert len(set(map(tuple, orders))) == len(keys)


def test_positions_are_uniform():
    # 2000 orders of 5: each number stands in each place 400 times, standard deviation 17.9.
    counts = [[0] * 5 for _ in range(5)]
    for seed in range(2000):
        for place, number in enumerate(seeded_permutation(5, seed, 1, 0)):
            counts[number][place] += 1
    assert all(abs(count - 400) < 5 * 17.9 for row in counts for count in row)


def test_a_prompt_carries_the_critics():
    rows = [Problem("p", "7", critic_prompt="p, 7"), Problem("q", "8")]
    with_own, without = dataset_of(rows, shuffle=False).next(2)
    assert with_own.critic_token_ids == tuple(tokenize("p, 7"))
    assert with_own.token_ids == tuple(tokenize("p")) and without.critic_token_ids is None
    with pytest.raises(DataError, match="problem 0 .* has 4 tokens, more than .*=3: 'p, 7'"):
        dataset_of(rows, max_prompt_tokens=3)
    # A run does not go on with other prompts for its critic.
    state = dataset_of(rows).state_dict()
    with pytest.raises(DataError, match="content of the data set"):
        dataset_of([Problem("p", "7", critic_prompt="p, 8"), rows[1]]).load_state_dict(state)
    assert dataset_of([Problem("p", "7"), rows[1]]).state_dict() != state


def test_a_prompt_carries_its_row():
    (prompt,) = make(1).next(1)
    assert (prompt.index, prompt.text, prompt.answer) == (0, "problem 0", "0")
    assert prompt.token_ids == tuple(tokenize("problem 0")) and prompt.source is None
    row = Problem("p", "7", {"verifier": "exact"}, "code")
    (prompt,) = dataset_of([row]).next(1)
    assert prompt.source == "code" and prompt.problem == row


def test_each_epoch_holds_every_problem_once_in_an_order_of_its_own():
    dataset = make(50)
    epochs = [indices(dataset.next(50)) for _ in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs[0] != list(range(50))


def test_the_order_depends_on_seed_and_epoch_alone_not_on_how_it_is_asked_for():
    whole = indices(make(7).next(60))
    pieces, dataset = [], make(7)
    for count in (1, 2, 20, 0, 30, 7):
        pieces += indices(dataset.next(count))
    assert pieces == whole
    assert indices(make(7, seed=1).next(60)) != whole


def test_more_than_an_epoch_at_once_wraps():
    prompts = indices(make(3).next(8))
    assert sorted(prompts[:3]) == sorted(prompts[3:6]) == [0, 1, 2]


def test_without_shuffling_the_order_is_the_files():
    dataset = make(3, shuffle=False)
    assert indices(dataset.next(5)) == [0, 1, 2, 0, 1]
    assert indices(dataset.problems) == [0, 1, 2]


def test_duplicates_are_problems_of_their_own():
    dataset = dataset_of([Problem("a", "1")] * 4)
    assert len(dataset) == 4 and sorted(indices(dataset.next(4))) == [0, 1, 2, 3]


@pytest.mark.parametrize("taken", [0, 3, 10, 13, 25])
def test_a_resumed_data_set_goes_on(taken):
    dataset = make()
    dataset.next(taken)
    state = json.loads(json.dumps(dataset.state_dict()))
    expected = indices(dataset.next(24))
    resumed = make()
    resumed.next(4)
    resumed.load_state_dict(state)
    assert indices(resumed.next(24)) == expected


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (make(11), "number of problems was 10 .* is 11 now"),
        (make(seed=3), "seed was 0 .* is 3 now"),
        (make(shuffle=False), "data.shuffle was True .* is False now"),
        (
            dataset_of([Problem(f"problem {i}", str(i if i else 9)) for i in range(10)]),
            "content of the data set",
        ),
    ],
)
def test_another_data_sets_state_is_refused(other, message):
    with pytest.raises(DataError, match=f"cannot resume the data: its {message}"):
        other.load_state_dict(make().state_dict())


def test_the_fingerprint_sees_where_texts_end():
    one = dataset_of([Problem("ab", "c")])
    with pytest.raises(DataError, match="content"):
        one.load_state_dict(dataset_of([Problem("a", "bc")]).state_dict())


def test_checking_a_state_changes_nothing():
    dataset, other = make(), make()
    other.next(13)
    expected = indices(make().next(24))
    dataset.check_state(other.state_dict())
    assert dataset.state_dict()["position"] == 0 and indices(dataset.next(24)) == expected


def test_prompts_that_cannot_be_sampled_from_are_refused_before_training():
    with pytest.raises(
        DataError, match=r"a.jsonl: problem 0 \(from 0\) has no tokens: 'x'; remove it"
    ):
        dataset_of([Problem("x", "1")], lambda text: [])
    problems = [Problem("xx", "1"), Problem("xxx", "1")]
    dataset_of(problems, max_prompt_tokens=3)
    with pytest.raises(
        DataError, match=r"problem 1 \(from 0\) has 3 tokens, more than .*_prompt_tokens=2.*raise"
    ):
        dataset_of(problems, max_prompt_tokens=2)


def test_each_prompt_is_tokenized_once():
    """The largest id of a vocabulary comes back as it was."""
    asked = []

    def tokenize(text):
        asked.append(text)
        return [2**31 - 1, 0]

    dataset = dataset_of([Problem("a", "1"), Problem("b", "2")], tokenize)
    prompts = [*dataset.next(5), *dataset.problems]
    assert {p.token_ids for p in prompts} == {(2**31 - 1, 0)} and asked == ["a", "b"]


def test_rows_that_are_left_out_change_nothing_of_the_others():
    whole, some = make(6), make(6, left_out={2: "cannot be read"})
    some.leave_out({4: "is refused", 2: "is refused"})
    order = [i for i in indices(whole.next(12)) if i not in (2, 4)]
    assert indices(some.next(8)) == order and indices(some.problems) == [0, 1, 3, 5]
    assert some.left_out == {2: "cannot be read", 4: "is refused"}, "the first reason stays"
    assert (
        len(some) == 6 and some.prompt(4).index == 4 and [i for i, _ in some.kept] == [0, 1, 3, 5]
    )
    # A run that leaves out more, or nothing, goes on at the same place.
    assert some.state_dict()["fingerprint"] == whole.state_dict()["fingerprint"]
    whole.load_state_dict(some.state_dict())
    with pytest.raises(
        DataError, match="a.jsonl: all 6 rows are left out .*: the first is refused"
    ):
        make(6, left_out={2: ""}).leave_out(dict.fromkeys(range(6), "is refused"))
