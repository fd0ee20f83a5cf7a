"""What passes hold, by hand for Qwen2.5-32B.

Not exercised: real allocations (test_memory_measured.py), and any GPU: the GPU column of
activations.py is from sources and code.
"""

import dataclasses

import pytest

from tests.planning.shapes import GPU_BYTES, make_config
from vapo_megatron.config import VapoConfig
from vapo_megatron.models.known import known_shape
from vapo_megatron.planning import activations, memory, model_bytes


def passes(shape, config, tokens):
    return activations.Passes(shape, config, "critic", pp_rank=0, tokens=tokens)


def test_a_layer_of_32b_saves(shape):
    # On a GPU, for each token, with h = 5120 / 8 = 640, q = 640, k = 128, p = 896, F = 3456, n = 5:
    # norms      2 * 2 h = 2560 elements
    # attention  p + (q + k) + q = 2304 elements and 4 n = 20 bytes
    # MLP        3 F = 10368 elements
    # 2 * (2560 + 2304 + 10368) + 20 = 30484 bytes
    # selective: p + 2 q = 2176 elements and no statistics: 2 * (2560 + 2176 + 10368) = 30208 bytes
    # (8 key-value heads over 8 ranks: the query is a view of the projection: p + q = 1536)
    config = make_config()

    def saved(recompute, **options):
        of = dataclasses.replace(shape, **options)
        return passes(of, config, 1000).layer(recompute)

    assert saved("none") == 30_484_000
    assert saved("selective") == 2 * (2560 + 1536 + 10368) * 1000
    assert saved("full") == 2 * 640 * 1000
    # With 16 key-value heads k = 256 and p = 1152, and the query is a copy.
    assert saved("selective", num_key_value_heads=16) == 2 * (2560 + 1152 + 1280 + 10368) * 1000
    # With 4 of them ranks gather the whole projection, 5120 + 2 * 512 = 6144.
    assert saved("none", num_key_value_heads=4) == 30_484_000 + 2 * (6144 - 896) * 1000


def test_without_sequence_parallelism_norms_are_whole(shape):
    # 4 norm tensors of 5120 in place of 640 elements.
    apart = make_config(sequence_parallel=False)
    found = passes(shape, apart, 10)
    assert found.layer("none") == (30_484 + 2 * 4 * (5120 - 640)) * 10
    assert found.layer("full") == 2 * 5120 * 10


@pytest.mark.parametrize(
    "pp,vpp,expected",
    [
        (1, None, [1]),
        (4, None, [4, 3, 2, 1]),
        # 2 (pp - rank - 1) + (vpp - 1) pp + 1 chunks: 6 + 4 + 1 on the first of 4 stages.
        (4, 2, [11, 9, 7, 5]),
    ],
)
def test_chunks_in_flight(pp, vpp, expected):
    config = make_config(8, pp, 4, vpp)
    found = [activations.chunks_in_flight(config, pp_rank=rank) for rank in range(pp)]
    assert found == expected


def test_no_more_microbatches_fly_than_there_are():
    tree = make_config(1, 4, 4).model_dump()
    tree["algorithm"] |= {"mini_batch_size": 8, "responses_per_step": 8, "group_size": 8}
    config = VapoConfig.model_validate(tree)
    # 8 responses over 4 ranks: two microbatches at most.
    assert [activations.chunks_in_flight(config, pp_rank=r) for r in range(4)] == [2, 2, 2, 1]
    # A virtual pipeline fills them up to a multiple of 4 stages: 4 microbatches of 2 chunks.
    tree["parallel"]["virtual_pipeline_model_parallel_size"] = 2
    config = VapoConfig.model_validate(tree)
    assert [activations.chunks_in_flight(config, pp_rank=r) for r in range(4)] == [8, 8, 7, 5]


def test_update_of_the_first_stage_of_32b(shape):
    # S = 24576 tokens, which is more than 2048 + 20480; 30484 bytes of a layer, 1280 of its input.
    # in flight   4 microbatches * 16 layers * 1280 S                      2013265920
    # gathered    5120 * 2 S                                                 251658240
    # received    2 * 1280 S                                                  62914560
    # one layer   (30484 - 1280) S                                           717717504
    # backward    2 * (3456 (S + 5120)) + gathered = 456916992, for 2 * 2 * 3456 S = 339738624 and
    #             2 * ((10240 - 3456) S + 2 * 3456 * 5120) = 404226048       456916992
    # residual    2 * 1280 S                                                  62914560
    phases = memory.phase_memory(shape, make_config(), gpu_bytes=GPU_BYTES, pp_rank=0)
    assert phases["actor_update"].activations == 3_565_387_776
    assert phases["actor_update"].logits == 0
    assert phases["critic_update"] == phases["actor_update"]  # the head is elsewhere


def test_update_of_the_last_stage_of_32b(shape):
    # 1 GiB / (4 * 19072) = 14074 rows, but no chunk has more than 4096: 19072 * 4096 * 4 =
    # 312475648 bytes of scores and 156237824 of their gradient in bfloat16, together more than
    # 195297280, the copy of the weight's gradient. Backward adds the hidden states' gradient
    # 2 * 5120 S = 251658240 and the weight's, 4 * VOCABULARY = 390594560.
    phases = memory.phase_memory(shape, make_config(), gpu_bytes=GPU_BYTES, pp_rank=3)
    logits = 251_658_240 + 390_594_560 + 312_475_648 + 156_237_824
    assert phases["actor_update"].logits == logits
    # Old log-probabilities have the entropy, too: chunk and tile share the rows.
    assert phases["logprobs"].logits == 312_475_648
    # One microbatch in flight; the final norm keeps 1280 S, the hidden states take 2 * 5120 S;
    # what a layer adds in its backward pass comes after the logits are gone.
    s = 24576
    held = 16 * 1280 * s + 251_658_240 + 62_914_560 + 1280 * s + 10240 * s
    added = 717_717_504 + 456_916_992 + 62_914_560
    assert phases["actor_update"].activations == held + added - logits
    # The critic has no logits, and its head keeps float32: 4 * 640.
    critic = phases["critic_update"]
    assert critic.activations == held - 10240 * s + 2560 * s + added and critic.logits == 0


def test_backward_pass_of_a_layer():
    # Second of two stages, a critic: no embedding, no logits; H = 896, F = 4864, bfloat16.
    # S = 1000: gate, up and product   2 F S = 9728000, for F (S + H) = 9222144
    # S = 500:  second linear layer    F (S + H) = 6790144, for 4864000 and
    #           first linear layer     (2 H - F) S + 2 F H = 7180288
    # S = 800:  second                 F (S + H) = 8249344, for 7782400 and 6258688
    # Beside it 4 H S: the residual stream's gradient twice, and what is received.
    shape = known_shape("Qwen2.5-0.5B")
    config = make_config(1, 2, 1, vllm_tp=1, recompute="none")
    for tokens, added in ((1000, 9_728_000), (500, 7_180_288), (800, 8_249_344)):
        where = {"pp_rank": 1, "tokens": tokens}
        found, logits = activations.Passes(shape, config, "critic", **where).training()
        held = activations.Passes(shape, config, "critic", **where).saved()
        assert found - held == 2 * (added + 4 * 896 * tokens) and logits == 0
    # The first stage's embedding has a gradient of 151936 * 896, more than all that.
    where = {"pp_rank": 0, "tokens": 1000}
    found, _ = activations.Passes(shape, config, "critic", **where).training()
    held = activations.Passes(shape, config, "critic", **where).saved()
    assert found - held == 2 * (151_936 * 896 + 2 * 896 * 1000)


def test_a_forward_pass_without_gradients():
    # A token of Qwen2.5-0.5B on one GPU: 4 H + 3 F = 4 * 896 + 3 * 4864 = 18176 elements, more than
    # 3 H + q + 2k + 3 q + k = 3 * 896 + 4 * 896 + 3 * 128 = 6656.
    shape = known_shape("Qwen2.5-0.5B")
    config = make_config(1, 1, 1, vllm_tp=1)
    where = {"pp_rank": 0, "tokens": 1000}
    assert activations.Passes(shape, config, "critic", **where).inference() == (2 * 18_176_000, 0)
    # Qwen3-0.6B has wide heads: 3 H + q + 2k + 3 q + k = 14336 for 4 H + 3 F = 13312.
    wide = known_shape("Qwen3-0.6B")
    assert activations.Passes(wide, config, "critic", **where).inference() == (2 * 14_336_000, 0)
    # 1 GiB / (4 * 151936) = 1766 rows of scores, a tile of 220 among them. All of 1000 rows at
    # once; a tile is an eighth of the largest chunk all the same.
    found = activations.Passes(shape, config, "actor", **where).inference()
    assert found == (3 * 896 * 2 * 1000, 151_936 * 4 * (1000 + 220))
    # A layer has more than the scores, and they hide a part of it; an actor's has another H, of the
    # hidden states of the microbatch before.
    logits = 151_936 * 4 * 1766
    long = {"pp_rank": 0, "tokens": 100_000}
    found = activations.Passes(shape, config, "actor", **long).inference()
    assert found == (2 * 1_907_200_000 - logits, logits)
    # On a CPU 192 MiB / (4 * 151936) = 331 rows in bfloat16, and two tiles of 41 in float32.
    found = activations.Passes(shape, config, "actor", **long, on_cpu=True).inference()
    assert found[1] == 151_936 * (331 * 2 + 2 * 41 * 4)


def test_an_entropy_bonus_needs_another_tile():
    # With H = 64 the scores are larger than the output weight's gradient. All of 1000 rows at once
    # leave room for a tile of 1766 / 8 = 220.
    shape = dataclasses.replace(known_shape("Qwen2.5-0.5B"), hidden_size=64)
    tree = make_config(1, 1, 1, vllm_tp=1).model_dump()
    sizes = []
    for tree["algorithm"]["entropy_coef"] in (0.0, 0.01):
        config = VapoConfig.model_validate(tree)
        where = {"pp_rank": 0, "tokens": 1000}
        sizes.append(activations.Passes(shape, config, "actor", **where).training()[1])
    assert sizes[1] - sizes[0] == 151_936 * 220 * 4


def test_norms_of_query_and_key_save_their_input():
    # Qwen3-4B on one GPU: q = 4096, k = 1024; the query that the norm takes is a copy.
    shape = known_shape("Qwen3-4B")
    plain = dataclasses.replace(shape, qk_norm=False)
    config = make_config(1, 1, 1, vllm_tp=1)

    def more(recompute):
        return [passes(of, config, 1).layer(recompute) for of in (shape, plain)]

    with_norm, without = more("none")
    assert with_norm - without == 2 * 4096
    with_norm, without = more("selective")  # the normed query and key stay beside it
    assert with_norm - without == 2 * (4096 + 1024)


def test_recomputing_some_layers(shape):
    """16 layers of a stage, 4 microbatches in flight; in units of 4, or the first 12."""
    s = 24576
    whole, inputs = 30_484 * s, 1280 * s

    def found(**parallel):
        one = passes(shape, make_config(recompute="full", **parallel), s)
        return one.chunk(), one.saved(), one.training()[0]

    every = found()
    assert every[0] == 16 * inputs
    units = found(recompute_num_layers=4)
    assert units[0] == 4 * inputs and units[1] == 4 * units[0]
    # Four layers at a time instead of one; the first one's input is what is kept.
    assert units[2] - units[1] - (every[2] - every[1]) == 3 * whole
    block = found(recompute_method="block", recompute_num_layers=12)
    assert block[0] == 12 * inputs + 4 * whole
    # When the first of the 12 is computed again, the 4 others have given back more than that.
    assert block[2] - block[1] == every[2] - every[1] - (whole - inputs)
    assert found(recompute_method="block", recompute_num_layers=16) == every
    # Virtual stages have 4 layers each, of which the numbers are.
    chunk = make_config(vpp=4, recompute="full", recompute_method="block", recompute_num_layers=3)
    assert passes(shape, chunk, s).chunk() == 3 * inputs + whole


def test_a_long_sequence_exceeds_the_budget():
    config = make_config(max_tokens_per_microbatch=1024)
    assert activations.microbatch_tokens(config) == 2048 + 20480


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_recomputation_saves_memory(shape, role):
    sizes = []
    for recompute in ("full", "selective", "none"):
        config = make_config(recompute=recompute)
        sizes.append(
            sum(activations.Passes(shape, config, role, pp_rank=0, tokens=24576).training())
        )
    assert sizes == sorted(set(sizes))


def test_context_parallel_ranks_share_a_microbatch(shape):
    half = make_config(cp=2, dp=2)
    assert activations.microbatch_tokens(half) == 24576 // 2
    assert half.parallel.data_parallel_size == 2 and half.parallel.replica_size == 4
    # A key has 128 elements on each of 8 ranks: 2 * 128 * 2 bytes a token, in two buffers of a ring
    # forward, and as many for their gradients backward.
    alone, shared = (passes(shape, c, 12_288) for c in (make_config(), half))
    ring = 12_288 * 2 * 128 * 2 * 2
    assert shared.inference()[0] - alone.inference()[0] == ring
    assert sum(shared.training()) - sum(alone.training()) == 2 * ring
    # Our own gathers those of 24,576 tokens: as they come and in order; float32 gradients twice.
    local = passes(shape, make_config(cp=2, dp=2, model={"layer_spec": "local"}), 12_288)
    assert local.inference()[0] - alone.inference()[0] == 24_576 * 2 * 128 * 2 * 2
    assert sum(local.training()) - sum(alone.training()) == 24_576 * 2 * 128 * (2 + 8)


def test_context_parallel_ranks_share_the_optimizers_state(shape):
    states = [
        model_bytes.state_bytes(shape, config, "actor", pp_rank=0)
        for config in (make_config(dp=4), make_config(cp=2, dp=2), make_config(cp=4, dp=1))
    ]
    assert states[0] == states[1] == states[2]
