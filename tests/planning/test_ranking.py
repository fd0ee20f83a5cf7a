"""Which layouts and variants are searched, and that a run would accept each of them."""

import argparse

import pytest

from tests.planning.shapes import changed, make_config, small_shape
from vapo_megatron.cli import plan_options
from vapo_megatron.config import load_config
from vapo_megatron.errors import ConfigError
from vapo_megatron.models.known import known_shape
from vapo_megatron.models.layout_rules import check_layout
from vapo_megatron.planning import ranking
from vapo_megatron.planning.ranking import Fixed


def base(world_size=128, **algorithm):
    config = load_config([], [f"algorithm.{name}={value}" for name, value in algorithm.items()])
    return changed(config, parallel={"world_size": world_size})


def layouts(shape, config, fixed=Fixed(), gpus_per_node=8):  # noqa: B008
    found, rejected = ranking.trainer_layouts(shape, config, fixed, gpus_per_node)
    sizes = [
        (c.parallel.tensor_model_parallel_size, c.parallel.pipeline_model_parallel_size)
        for c in found
    ]
    return sizes, rejected


def test_every_layout_that_divides():
    sizes, rejected = layouts(known_shape("Qwen2.5-32B"), base())
    # 64 layers: PP may be any power of two up to 64 that leaves no half GPU; 128 is more than 64.
    powers = (1, 2, 4, 8, 16, 32, 64)
    assert sizes == [(tp, pp) for tp in (1, 2, 4, 8) for pp in powers if tp * pp <= 128]
    assert rejected == {}


def test_stages_are_searched_up_to_the_layers():
    sizes, rejected = layouts(known_shape("Qwen2.5-32B"), base(2**37))
    assert not sizes and len(rejected) == 28


def test_what_does_not_divide_is_named():
    sizes, rejected = layouts(known_shape("Qwen2.5-0.5B"), base(8))
    # 14 heads, 2 key-value heads, 24 layers.
    assert sizes == [(1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 2), (2, 4)]
    assert rejected["TP 4 x PP 1"] == (
        "parallel.tensor_model_parallel_size=4 must divide the model's num_attention_heads=14"
    )
    assert set(rejected) == {"TP 4 x PP 1", "TP 4 x PP 2", "TP 8 x PP 1"}


def test_a_mini_batch_needs_a_response_on_each_rank():
    config = base(responses_per_step=32, mini_batch_size=32)
    sizes, rejected = layouts(known_shape("Qwen2.5-32B"), config)
    assert min(tp * pp for tp, pp in sizes) == 4
    assert "must be at least the data-parallel size 128" in rejected["TP 1 x PP 1"]


def test_what_is_chosen_is_not_searched():
    fixed = Fixed(tp=8, pp=4, vpp=2, recompute="full", max_tokens=24576, offload=False)
    shape = known_shape("Qwen2.5-32B")
    sizes, _ = layouts(shape, base(), fixed)
    assert sizes == [(8, 4)]
    found, _ = ranking.trainer_layouts(shape, base(), fixed, 8)
    (variant,) = ranking.variants(shape, found[0], fixed)
    assert variant.parallel.virtual_pipeline_model_parallel_size == 2
    assert variant.parallel.max_tokens_per_microbatch == 24576
    assert variant.parallel.offload is False
    assert ranking.rollout_tp_sizes(shape, base(), Fixed(vllm_tp=2), 8) == [2]
    chosen = ranking.with_parallel(found[0], offload=True)
    (variant,) = ranking.variants(shape, chosen, fixed._replace(offload=None))
    assert variant.parallel.offload is True, "the configuration's own"


def test_a_chosen_layout_outside_a_node_is_looked_at():
    shape = known_shape("Llama-3.1-70B")
    sizes, _ = layouts(shape, base(64), Fixed(tp=16))
    assert sizes == [(16, 1), (16, 2), (16, 4)]


def test_variants_are_different_and_good():
    shape = known_shape("Qwen2.5-32B")
    found, _ = ranking.trainer_layouts(shape, base(), Fixed(tp=8, pp=4), 8)
    variants = list(ranking.variants(shape, found[0], Fixed()))
    # VPP 1, 2, 4; three recomputations; budgets of 22528, half and twice of it; offload or not.
    assert len(variants) == 54 == len({v.to_yaml() for v in variants})
    budgets = {v.parallel.max_tokens_per_microbatch for v in variants}
    assert budgets == {11264, 22528, 45056}
    assert all(v.parallel.sequence_parallel for v in variants)
    for variant in variants:
        check_layout(shape, variant.parallel)


def test_no_chunks_without_a_pipeline_or_layers_for_them():
    shape = known_shape("Qwen2.5-0.5B")
    found, _ = ranking.trainer_layouts(shape, base(8), Fixed(tp=1), 8)
    chunks = [
        {
            v.parallel.virtual_pipeline_model_parallel_size
            for v in ranking.variants(shape, layout, Fixed())
        }
        for layout in found
    ]
    # 24 layers on PP 1, 2, 4, 8: 24, 12, 6, 3 of a stage.
    assert chunks == [{None}, {None, 2, 4}, {None, 2}, {None}]
    sizes, rejected = layouts(shape, base(8), Fixed(tp=1, vpp=2))
    assert sizes == [(1, 2), (1, 4)]
    assert rejected == {
        "TP 1 x PP 1": "parallel.virtual_pipeline_model_parallel_size=2 needs "
        "parallel.pipeline_model_parallel_size > 1, found 1",
        "TP 1 x PP 8": "parallel.pipeline_model_parallel_size=8 times virtual_pipeline_model_"
        "parallel_size=2 must divide the model's num_hidden_layers=24",
    }


def test_no_chunks_with_batched_sends():
    shape = known_shape("Qwen2.5-32B")
    config = changed(base(), parallel={"batch_p2p_comm": True})
    found, _ = ranking.trainer_layouts(shape, config, Fixed(tp=8, pp=4), 8)
    chunks = [
        v.parallel.virtual_pipeline_model_parallel_size
        for v in ranking.variants(shape, found[0], Fixed())
    ]
    assert chunks == [None] * 18  # Recomputations times budgets, each with offload and without.
    _, rejected = layouts(shape, config, Fixed(tp=8, pp=4, vpp=2))
    assert "batch_p2p_comm=true must not be combined" in rejected["TP 8 x PP 4"]


def test_powers_of_two_within_a_node_are_tried_and_the_help_says_so():
    parser = argparse.ArgumentParser()
    plan_options.add_layout(parser.add_argument_group())
    text = " ".join(parser.format_help().split())
    assert text.count("(powers of two within a node)") == 2
    # 12 heads and 12 GPUs would take 3 and 6, too.
    shape = small_shape(hidden=48, layers=12, heads=12, kv_heads=12, head=4, ffn=96, vocab=64)
    sizes, rejected = layouts(shape, base(12), gpus_per_node=6)
    assert {tp for tp, _ in sizes} == {1, 2, 4} and rejected == {}
    assert ranking.rollout_tp_sizes(shape, base(12), Fixed(), 6) == [1, 2, 4]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("Qwen2.5-0.5B", [1, 2]), ("Qwen2.5-7B", [1, 2, 4]), ("Qwen2.5-32B", [1, 2, 4, 8])],
)
def test_sizes_of_vllm(name, sizes):
    assert ranking.rollout_tp_sizes(known_shape(name), base(), Fixed(), 8) == sizes
    assert ranking.rollout_tp_sizes(known_shape(name), base(), Fixed(), 2) == [1, 2]


@pytest.mark.parametrize(("name", "chosen"), [("Qwen2.5-32B", 8), ("Qwen2.5-7B", 3)])
def test_a_size_of_vllm_that_cannot_be(name, chosen):
    # 8 divides 32B's 40 heads, but not 4 GPUs; 3 divides neither 28 heads nor 4.
    with pytest.raises(ConfigError, match=f"size={chosen} must divide parallel.world_size=4 and"):
        ranking.rollout_tp_sizes(known_shape(name), base(4), Fixed(vllm_tp=chosen), 8)


def test_a_number_of_layers_may_be_recomputed_instead_of_all():
    """Of a stage's 16 layers; a chunk of a virtual stage has 4, which are fewer than 6."""
    shape = known_shape("Qwen2.5-32B")
    layout = make_config(8, 4, 4, vllm_tp=8)
    fixed = ranking.Fixed(recompute_layers=6, offload=True, max_tokens=22528)
    found = [v.parallel for v in ranking.variants(shape, layout, fixed)]
    assert {(p.recompute, p.recompute_method, p.recompute_num_layers) for p in found} == {
        ("full", "block", 6)
    }
    assert {p.virtual_pipeline_model_parallel_size for p in found} == {None, 2}
    others = [v.parallel for v in ranking.variants(shape, layout, ranking.Fixed())]
    assert {(p.recompute_method, p.recompute_num_layers) for p in others} == {("uniform", 1)}
