"""The batch's index arithmetic, against loops over lists.

Not exercised: a GPU (the device test stands in for it), the model that reads the indices.
"""

import pytest
import torch

from vapo_megatron.data.batch import RolloutBatch
from vapo_megatron.data.microbatch import make_microbatch

PROMPTS = [2, 1, 3, 1]
RESPONSES = [3, 4, 0, 2]
PER_TOKEN = ("rollout_logprobs", "loss_mask", "old_logprobs", "values", "advantages", "returns")


def bounds(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def make_batch(complete=True):
    """Token j of response i is 100 * i + j + 50; of its prompt, 100 * i + j."""
    tokens = []
    for i, (p, r) in enumerate(zip(PROMPTS, RESPONSES)):
        tokens += [100 * i + j for j in range(p)] + [100 * i + j + 50 for j in range(r)]
    total = sum(RESPONSES)
    fields = {name: torch.arange(total) + k / 8 for k, name in enumerate(PER_TOKEN)}
    if not complete:
        for name in PER_TOKEN[2:]:
            fields[name] = None
    return RolloutBatch(
        tokens=torch.tensor(tokens),
        sequence_cu_seqlens=bounds([p + r for p, r in zip(PROMPTS, RESPONSES)]),
        cu_seqlens=bounds(RESPONSES),
        positions=torch.tensor([7, 5, 3, 1]),
        rewards=torch.tensor([1.0, -1.0, 0.5, 0.0]),
        is_correct=torch.tensor([True, False, True, False]),
        truncated=torch.tensor([False, False, True, True]),
        **fields,
    )


def test_lengths():
    batch = make_batch()
    assert batch.num_responses == 4
    assert batch.response_lengths.tolist() == RESPONSES
    assert batch.sequence_lengths.tolist() == [5, 5, 3, 3]
    # 1 three times, 2 four times, 3 no times, 4 twice
    spread = batch.per_token(torch.tensor([1, 2, 3, 4]))
    assert spread.tolist() == [1, 1, 1, 2, 2, 2, 2, 4, 4]


@pytest.mark.parametrize(("first", "count"), [(0, 4), (1, 2), (3, 1), (2, 1), (2, 0)])
def test_narrow_keeps_each_responses_own(first, count):
    batch = make_batch()
    part, picked = batch.narrow(first, count), range(first, first + count)
    cu_t, cu_s = batch.cu_seqlens.tolist(), batch.sequence_cu_seqlens.tolist()
    rows_t = [t for i in picked for t in range(cu_t[i], cu_t[i + 1])]
    rows_s = [s for i in picked for s in range(cu_s[i], cu_s[i + 1])]
    assert part.tokens.tolist() == [batch.tokens.tolist()[s] for s in rows_s]
    for name in PER_TOKEN:
        whole = getattr(batch, name).tolist()
        assert getattr(part, name).tolist() == [whole[t] for t in rows_t]
    for name in ("positions", "rewards", "is_correct", "truncated"):
        whole = getattr(batch, name).tolist()
        assert getattr(part, name).tolist() == [whole[i] for i in picked]
    assert part.cu_seqlens.tolist() == bounds([RESPONSES[i] for i in picked]).tolist()
    assert part.cu_seqlens.dtype == part.sequence_cu_seqlens.dtype == torch.int32
    assert part.sequence_lengths.tolist() == [PROMPTS[i] + RESPONSES[i] for i in picked]


def test_fields_that_do_not_exist_yet_stay_none():
    part = make_batch(complete=False).narrow(1, 1)
    assert part.values is None and part.old_logprobs is None
    assert part.replace(values=torch.zeros(4)).values.tolist() == [0] * 4


def test_the_critics_prompts_take_the_place_of_the_others():
    own = [[900], [], [910, 911], [920, 921, 922]]
    batch = make_batch().replace(
        critic_prompts=torch.tensor(sum(own, [])), critic_prompt_lengths=torch.tensor([1, 0, 2, 3])
    )
    seen = batch.for_critic()
    responses = [[100 * i + j + 50 for j in range(r)] for i, r in enumerate(RESPONSES)]
    assert seen.tokens.tolist() == sum([p + r for p, r in zip(own, responses)], [])
    assert seen.sequence_cu_seqlens.dtype == torch.int32
    assert seen.sequence_lengths.tolist() == [len(p) + r for p, r in zip(own, RESPONSES)]
    for name in (*PER_TOKEN, "cu_seqlens", "positions"):
        assert getattr(seen, name) is getattr(batch, name)
    assert seen.prompt_lengths.tolist() == [1, 0, 2, 3]
    # Of the last response, two tokens behind a prompt of three.
    micro = make_microbatch(seen.narrow(3, 1))
    assert micro.predicting.tolist() == [2, 3] and micro.targets.tolist() == responses[3]
    assert batch.narrow(0, 2).critic_prompts is None, "only the whole batch has them"


TURNS = (
    # Prompt, action, observation, action; then a single turn; then an observation before it.
    ([1, 2], [([], [3, 4]), ([50, 51, 52], [5, 6])]),
    ([7], [([], [8])]),
    ([9], [([60, 61], [10, 11, 12])]),
)
VALUE_TOKENS = [2, 3, 52, 5, 7, 61, 10, 11]
"""Where each action token's value is read: that before it, also where others wrote it."""


def two_turns():
    tokens, places, sequences, responses = [], [], [], []
    for prompt, turns in TURNS:
        sequence = list(prompt)
        before = len(places)
        for observation, action in turns:
            sequence += observation
            places += range(len(sequence), len(sequence) + len(action))
            sequence += action
        tokens += sequence
        sequences.append(len(sequence))
        responses.append(len(places) - before)
    return RolloutBatch(
        tokens=torch.tensor(tokens),
        sequence_cu_seqlens=bounds(sequences),
        cu_seqlens=bounds(responses),
        prompt_lengths=torch.tensor([len(prompt) for prompt, _ in TURNS]),
        places=torch.tensor(places).int(),
        rollout_logprobs=torch.zeros(len(places)),
    )


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_what_others_wrote_is_no_target_and_a_value_is_read_behind_it(cp_size):
    batch = two_turns()
    actions = [t for _, turns in TURNS for _, action in turns for t in action]
    parts = [make_microbatch(batch, cp_size=cp_size, cp_rank=rank) for rank in range(cp_size)]
    read = torch.cat([part.tokens for part in parts])
    assert read[parts[0].outputs].tolist() == VALUE_TOKENS
    # Each rank's targets, put back where its predictions stand in the response.
    targets = torch.zeros(len(actions), dtype=torch.long)
    size = len(parts[0].tokens)
    for rank, part in enumerate(parts):
        targets[part.outputs // size == rank] = part.targets
    assert targets.tolist() == actions
    # Places count from a sequence's begin, and so stay what they are in a part of the batch.
    (narrow,) = [make_microbatch(batch.narrow(1, 2))]
    assert narrow.targets.tolist() == actions[4:]
    picked = make_microbatch(batch.picked(torch.tensor([True, False, True])))
    assert picked.targets.tolist() == actions[:4] + actions[5:]


def test_the_critics_prompt_moves_all_that_follows():
    own = [[900, 901, 902], [], [910]]
    batch = two_turns().replace(
        critic_prompts=torch.tensor(sum(own, [])), critic_prompt_lengths=torch.tensor([3, 0, 1])
    )
    seen = make_microbatch(batch.for_critic().narrow(0, 1))
    assert seen.tokens.tolist() == [900, 901, 902, 3, 4, 50, 51, 52, 5, 6]
    assert seen.tokens[seen.predicting].tolist() == [902, 3, 52, 5]


def test_a_column_that_is_not_in_the_table_is_refused():
    with pytest.raises(AssertionError, match="vaules"):
        make_batch().replace(vaules=torch.zeros(9))
    with pytest.raises(AttributeError, match="vaules"):
        make_batch().vaules  # noqa: B018


def test_narrowing_twice_is_narrowing_once():
    batch = make_batch()
    twice, once = batch.narrow(1, 3).narrow(1, 1), batch.narrow(2, 1)
    assert torch.equal(twice.tokens, once.tokens) and torch.equal(twice.values, once.values)


@pytest.mark.parametrize("multiple_of", [1, 2, 8, 16, 32])
def test_a_microbatch_predicts_each_response_token_from_the_position_before(multiple_of):
    batch = make_batch()
    micro = make_microbatch(batch, multiple_of=multiple_of)
    size = 16  # 5 + 5 + 3 + 3
    padded = -(-size // multiple_of) * multiple_of
    assert micro.tokens.numel() == micro.position_ids.numel() == padded
    # The response tokens themselves: three of response 0, four of 1, none of 2, two of 3.
    expected = [50, 51, 52, 150, 151, 152, 153, 350, 351]
    assert micro.targets.tolist() == expected
    # The positions before: sequences start at 0, 5, 10, 13 and their prompts are 2, 1, 3, 1 long.
    assert micro.predicting.tolist() == [1, 2, 3, 5, 6, 7, 8, 13, 14]
    positions = [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2]
    assert micro.position_ids.tolist() == positions + list(range(padded - size))
    ends = [0, 5, 10, 13, 16] + ([padded] if padded > size else [])
    assert micro.model_cu_seqlens.tolist() == ends and micro.model_cu_seqlens.dtype == torch.int32
    assert micro.max_seqlen == max(5, padded - size)


@pytest.mark.parametrize("multiple_of", [1, 4])
def test_an_empty_microbatch_is_padding_alone(multiple_of):
    micro = make_microbatch(make_batch().narrow(0, 0), multiple_of=multiple_of)
    assert micro.tokens.numel() == micro.max_seqlen == multiple_of
    assert micro.predicting.numel() == micro.targets.numel() == 0
    assert micro.model_cu_seqlens.tolist() == [0, multiple_of]


def test_everything_stays_on_the_batchs_device():
    """Under another default device, an index made without naming one would not meet its data."""
    batch = make_batch()
    with torch.device("meta"):
        micro = make_microbatch(batch.narrow(1, 3), multiple_of=8)
        assert micro.targets.tolist() == [150, 151, 152, 153, 350, 351]
        assert micro.position_ids.device.type == micro.tokens.device.type == "cpu"
