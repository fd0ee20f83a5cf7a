"""Plans with adapters (model.lora): bytes, FLOPs and seconds by hand, and what a plan says.

Not exercised: real allocations (test_memory_measured.py), and any GPU. FLOPs are compared with
torch's counter.
"""

import dataclasses

import pytest
import torch
import yaml
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.models.built import Layout, build, call, write_hf
from tests.planning.by_hand import FAST_MEMORY, OUTPUT, PAIR, ROUND, SHAPE, TOKEN, WORKLOAD
from tests.planning.by_hand import config as tiny
from tests.planning.shapes import GPU_BYTES, LAYER, VOCABULARY, changed, make_config
from vapo_megatron.config import VapoConfig, load_config
from vapo_megatron.errors import ConfigError
from vapo_megatron.models.known import known_shape
from vapo_megatron.planning import activations, flops, memory, model_bytes, roofline, sync_time
from vapo_megatron.planning.adapters import adapted_layers
from vapo_megatron.planning.cluster import Cluster
from vapo_megatron.planning.describe import describe_misfit, describe_plan, to_paste
from vapo_megatron.planning.host_memory import host_bytes
from vapo_megatron.planning.memory import checkpoint_bytes
from vapo_megatron.planning.misfits import check_fits
from vapo_megatron.planning.notes import not_modelled
from vapo_megatron.planning.parameters import Adapters, adapters_of
from vapo_megatron.planning.plan import make_plan, model_flops, offload_seconds
from vapo_megatron.planning.ranking import Fixed, rank
from vapo_megatron.planning.workload import workload_of

# Of Qwen2.5-32B on one of 8 tensor-parallel ranks, rank 32. A of q, k, v and of gate and up are
# whole, 5 * 32 * 5120; their B have 896 and 6912 rows of 32; A of o and down have 640 and 3456
# columns, and B is whole, 2 * 5120 * 32: 819200 + 249856 + 131072 + 327680 = 1527808 in a layer.
ADAPTERS = 64 * 1_527_808
BASE = 64 * LAYER + 2 * VOCABULARY + 5120
# Of the whole model 32 * (5 * 5120 + 5120 + 27648) in A and 32 * (7168 + 5120 + 55296 + 5120) in B.
WHOLE = 64 * 32 * (58_368 + 72_704)


def with_adapters(config, **lora):
    model = config.model.model_dump() | {"lora": {"rank": 32, **lora}}
    return VapoConfig.model_validate({**config.model_dump(), "model": model})


def node(dp=1, algorithm=None, *, lora=None, **parallel):
    """32B with adapters on TP 8."""
    config = make_config(8, 1, dp, vllm_tp=8, algorithm=algorithm, **parallel)
    return with_adapters(config, **(lora or {}))


def test_adapters_and_a_head_alone_are_trained(shape):
    # Every size is a multiple of 64, and their sum one of 128.
    n = ADAPTERS
    actor = model_bytes.state_bytes(shape, node(2), "actor", pp_rank=0)
    assert actor == (2 * n, 4 * n, 12 * n // 2)
    critic = model_bytes.state_bytes(shape, node(2), "critic", pp_rank=0)
    assert critic == tuple(size + per * 5120 for size, per in zip(actor, (2, 4, 6), strict=True))
    # The reference is the actor without adapters; with a saved one it has the actor's first.
    config = node(algorithm={"kl_coef": 0.1})
    assert model_bytes.state_bytes(shape, config, "reference", pp_rank=0) == (0, 0, 0)
    started = with_adapters(config, path="adapter")
    assert model_bytes.state_bytes(shape, started, "reference", pp_rank=0) == (2 * n, 0, 0)
    # Value pretraining alone: the actor's adapters are there, and stand still.
    alone = node(algorithm={"stage": "value_pretraining"})
    assert model_bytes.state_bytes(shape, alone, "actor", pp_rank=0) == (2 * n, 0, 0)


def test_a_matrix_without_an_adapter_still_has_rows_in_its_layers_b(shape):
    some = node(lora={"targets": ["v_proj", "up_proj"]})
    # A of v and of up, 2 * 32 * 5120, and all 896 + 6912 rows of 32.
    n = 64 * 32 * (2 * 5120 + 896 + 6912)
    assert model_bytes.state_bytes(shape, some, "actor", pp_rank=0).parameters == 2 * n
    first, second = adapted_layers(shape, some, "actor")
    assert (first.pairs, first.outputs, first.target_outputs) == (1, 896, 128)
    assert (second.pairs, second.outputs, second.target_outputs) == (1, 6912, 3456)
    with pytest.raises(ConfigError, match="up_proj would be of experts"):
        adapters_of(known_shape("Qwen3-30B-A3B"), some, "actor")


def test_a_base_is_there_once(shape):
    shared, apart = node(), node(lora={"share_base": False})
    for role in ("actor", "critic"):
        assert model_bytes.base_bytes(shape, shared, role, pp_rank=0) == 2 * BASE
    # A critic's own has no output projection.
    own = 2 * (BASE - VOCABULARY)
    assert model_bytes.base_bytes(shape, apart, "critic", pp_rank=0) == own
    for config, every in ((shared, 2 * BASE), (apart, 2 * BASE + own)):
        assert model_bytes.all_base_bytes(shape, config, pp_rank=0) == every
        resident = changed(config, parallel={"offload": False})
        phases = memory.phase_memory(shape, resident, gpu_bytes=GPU_BYTES, pp_rank=0)
        assert {phase.base for phase in phases.values()} == {every}
        state = 2 * 2 * ADAPTERS + 2 * 5120
        assert {phase.parameters for phase in phases.values()} == {state}
        where = {"pp_rank": 0, "is_first_replica": True, "keeps_rollouts": False}
        host = host_bytes(shape, config, is_offloaded=True, **where)
        assert host.offloaded == 14 * (2 * ADAPTERS + 5120) + every
        # A checkpoint's copy has no base.
        assert host.checkpoint == 14 * (2 * ADAPTERS + 5120)


def test_phases_hold_the_base_of_their_role(shape):
    phases = memory.phase_memory(
        shape, node(algorithm={"kl_coef": 0.1}), gpu_bytes=GPU_BYTES, pp_rank=0
    )
    found = {name: (phase.parameters, phase.base) for name, phase in phases.items()}
    n, head = 2 * ADAPTERS, 2 * 5120
    assert found == {
        "generation": (0, 0),
        "values": (n + head, 2 * BASE),
        "logprobs": (n, 2 * BASE),
        "reference_logprobs": (0, 2 * BASE),
        "critic_update": (n + head, 2 * BASE),
        "actor_update": (n, 2 * BASE),
        "sync": (n, 2 * BASE),
    }
    # No layer's weight has a gradient, which Transformer Engine would keep empty ones for.
    plain = make_config(8, 1, 1, vllm_tp=8, model={"layer_spec": "auto"})
    assert model_bytes.dummy_gradient_bytes(shape, plain) > 0
    assert model_bytes.dummy_gradient_bytes(shape, with_adapters(plain)) == 0
    assert model_bytes.dummy_gradient_bytes(shape, with_adapters(plain, roles=["actor"])) > 0


def test_a_role_without_adapters_trains_all_of_its_weights(shape):
    config = node(lora={"roles": ["critic"]})
    plain = make_config(8, 1, 1, vllm_tp=8)
    states = [model_bytes.state_bytes(shape, c, "actor", pp_rank=0) for c in (config, plain)]
    assert states[0] == states[1]
    assert model_bytes.base_bytes(shape, config, "critic", pp_rank=0) == 2 * (BASE - VOCABULARY)


def test_a_reward_model_has_no_adapters(shape):
    config = with_adapters(make_config(8, 1, 1, vllm_tp=8, model={"reward_hf_path": "Qwen2.5-14B"}))
    small = known_shape("Qwen2.5-14B")
    assert adapters_of(small, config, "reward_model") is None
    whole = model_bytes.state_bytes(small, config, "reward_model", pp_rank=0).parameters
    assert whole > 2 * 12e9 / 8
    assert model_bytes.all_base_bytes(shape, config, pp_rank=0) == 2 * BASE


def test_a_checkpoint_is_what_is_trained(shape):
    assert checkpoint_bytes(shape, node()) == 14 * (2 * WHOLE + 5120) == 7_516_264_448
    assert checkpoint_bytes(shape, node(lora={"roles": ["actor"]})) > 14 * 31e9


def test_a_layer_saves_its_adapters_inputs(shape):
    # As test_activations.py counts 32B on TP 8, for each token: norms 2560, attention 2304 and 20
    # bytes, gate and up 2 * 3456, and the product, which only the adapter of down takes. Narrow
    # tensors: 3 * 32 and 2 * 32 of all tokens, 2 * 32 of an eighth of them: 168.
    # Once: A of q, k, v, of gate and up, of o, of down: 32 * (5 * 5120 + 640 + 3456); a key-value
    # head on each rank, so that no B is copied.
    tokens, copies = 1000, 2 * 32 * (5 * 5120 + 640 + 3456)

    def saved(config):
        where = {"pp_rank": 0, "tokens": tokens}
        return activations.Passes(shape, config, "critic", **where).layer("none")

    assert saved(node()) == (30_484 + 2 * 168) * tokens + copies
    # Without adapters of gate, up and down the MLP keeps gate and up alone.
    attention = node(lora={"targets": ["q_proj", "k_proj", "v_proj", "o_proj"]})
    less = 2 * (640 + 3456 + 2 * 32 + 4)
    copies = 2 * 32 * (3 * 5120 + 640)
    assert saved(attention) == (30_484 + 2 * 168 - less) * tokens + copies
    # TP 4 has two key-value heads on a rank: a copy of B, 1792 rows of 32.
    one = adapted_layers(shape, with_adapters(make_config(4, 1, 2, vllm_tp=8)), "actor")[0]
    assert one.name == "linear_qkv" and one.copied == 3 * 32 * 5120 + 32 * 1792


def test_frozen_outputs_and_embeddings_have_no_gradient(shape):
    where = {"pp_rank": 0, "tokens": 24_576}
    config = make_config(8, 1, 1, vllm_tp=8)
    plain, frozen = (
        activations.Passes(shape, c, "actor", **where).training()[1]
        for c in (config, with_adapters(config))
    )
    assert plain - frozen == 4 * VOCABULARY


def counted(hf_path, role, lengths):
    """Forward and backward: torch's count of products, and this module's; a worker's function."""
    from vapo_megatron.roles.base import Base
    from vapo_megatron.weights.adapters import attach_adapters

    made = build(hf_path, Layout(), role, layer_spec="local", lora={"rank": 3, "targets": TARGETS})
    Base(made.chunks, keeps_head=role == "critic")
    attach_adapters(
        made.chunks, made.shape, made.ranks, made.config.model.lora, role, seed=0,
        sequence_parallel=False,
    )  # fmt: skip
    ids = [torch.randint(made.shape.vocab_size, (n,)) for n in lengths]
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        call(made.chunks[0], ids).sum().backward()
    outputs = sum(lengths) if role == "critic" else 0
    adapters = adapters_of(made.shape, made.config, role)
    expected = flops.training_flops(
        made.shape, lengths, role=role, num_outputs=outputs, adapters=adapters
    )
    return counter.get_total_flops(), expected


TARGETS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_torch_counts_the_same(workers, tmp_path, role):
    ((found, expected),) = workers.run(1, counted, write_hf(tmp_path), role, [1] * 12)
    assert found == expected


def test_frozen_products_are_two_thirds(shape):
    config, workload = node(), workload_of(node())
    plain = model_flops(shape, make_config(8, 1, 1, vllm_tp=8), workload)
    assert 2 / 3 < model_flops(shape, config, workload) / plain < 0.75


def test_an_update_by_hand():
    # Rank 1 of SHAPE: A and B of q, k, v, o 4 + 4 each, of gate, up, down 4 + 5 each: 59 weights,
    # 118 FLOPs a token and layer, forward, and twice that backward. A frozen matrix once.
    config = with_adapters(tiny(1), rank=1)
    seconds = roofline.update(SHAPE, config, FAST_MEMORY, WORKLOAD, "critic").seconds
    layer = 64 * (2 * TOKEN + 3 * 118e-12) + 3.5 * 8 * 36 * PAIR
    assert seconds == pytest.approx(4 * layer, rel=1e-6)
    forward = roofline.scoring(SHAPE, config, FAST_MEMORY, WORKLOAD, "critic").seconds
    assert forward == pytest.approx(4 * (64 * (TOKEN + 118e-12) + 8 * 36 * PAIR), rel=1e-6)
    # Recomputed, one more of either; the actor's output projection has no gradient, either.
    full = with_adapters(tiny(1, recompute="full"), rank=1)
    again = roofline.update(SHAPE, full, FAST_MEMORY, WORKLOAD, "critic").seconds
    assert again - seconds == pytest.approx(forward, rel=1e-6)
    actor = roofline.update(SHAPE, config, FAST_MEMORY, WORKLOAD, "actor").seconds
    assert actor - seconds == pytest.approx(3 * 48 * OUTPUT, rel=1e-4)


def test_an_updates_memory_and_wires_by_hand():
    slow = dataclasses.replace(ROUND, peak_tflops=1e12)
    config = with_adapters(tiny(1), rank=1)
    phase = roofline.update(SHAPE, config, slow, WORKLOAD, "critic")
    # 4 layers of 7 A of 4 (down: 5) and B of 12, 4, 10 and 4, and a head of 4; 42 + 4 bytes each.
    held = 4 * (6 * 4 + 5 + 12 + 4 + 10 + 4) + 4
    assert phase.between_seconds == pytest.approx(2 * 46 * held * 1e-9)
    # Beside 71 elements of a layer, three times: inputs 4 + 4 + 4 + 5 = 17 and outputs
    # 12 + 4 + 10 + 4 = 30; 17 + 6 * 30 forward and 4 * 17 + 2 * 30 backward.
    passes = 4 * 64 * (3 * 71 + 17 + 180 + 68 + 60) * 2e-9
    assert phase.seconds == pytest.approx(passes + 8 * 10 * held * 1e-9 + phase.between_seconds)
    # Gradients of 4 ranks, 4 bytes to be summed and 2 to be gathered: of what is trained.
    fast = dataclasses.replace(FAST_MEMORY, peak_tflops=1e12)
    wires = roofline.update(SHAPE, with_adapters(tiny(4), rank=1), fast, WORKLOAD, "critic")
    assert wires.seconds == pytest.approx(2 * 0.75 * 6 * held * 1e-9)
    # TP 2: 3 + 1 + 2 + 1 columns of 2 bytes of 64 tokens, gathered or summed, each way.
    even = dataclasses.replace(SHAPE, ffn_hidden_size=6)
    split = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    seconds = [
        roofline.update(even, c, fast, WORKLOAD, "critic").seconds
        for c in (tiny(2, **split), with_adapters(tiny(2, **split), rank=1))
    ]
    assert seconds[1] - seconds[0] == pytest.approx(4 * 2 * 64 * 7 * 2 / 2 * 1e-9, rel=1e-3)


def test_a_sync_merges_first():
    cluster = dataclasses.replace(ROUND, num_gpus=1)
    plain, config = tiny(1), with_adapters(tiny(1), rank=1)
    seconds = [sync_time.sync_seconds(SHAPE, c, cluster) for c in (plain, config)]
    # q, k and v 12 x 4, o 4 x 4, gate and up 10 x 4, down 4 x 5: 124 weights in 4 layers.
    assert seconds[1] - seconds[0] == pytest.approx(28 * 4 * 124 * 1e-9)
    assert (
        sync_time.sync_seconds(SHAPE, with_adapters(tiny(1), roles=["critic"]), cluster)
        == (seconds[0])
    )


def test_a_base_is_copied_in_alone(shape):
    cluster = Cluster(num_gpus=8)
    config = changed(node(), parallel={"offload": True})
    own = 2 * ADAPTERS + 5120
    # Parameters for the scores, with optimizers in and out for the updates; a base twice each.
    expected = 2 * own + 2 * 14 * own + 4 * 2 * BASE
    seconds = offload_seconds(shape, config, cluster)
    assert seconds == pytest.approx(expected / cluster.rate("pcie"), rel=1e-3)


# --- what a plan says -----------------------------------------------------------------------------

NODE = Cluster(num_gpus=8)
RECIPE = ["examples/configs/qwen2.5_base.yaml", "examples/configs/qwen2.5_32b_lora.yaml"]


def test_the_recipe_fits_one_node_and_its_terms_are_shown(shape, tmp_path):
    config = load_config(RECIPE)
    plan = make_plan(shape, config, NODE, workload_of(config))
    assert plan.peak[1].total < 0.9 * GPU_BYTES
    told = describe_plan(shape, plan)
    columns = next(line for line in told.splitlines() if line.startswith("  GB  "))
    assert columns.split()[:4] == ["GB", "params", "base", "grads"]
    # Half of 65.5 GB; 2 bytes of 64 * 2.5e6 adapters.
    update = next(line for line in told.splitlines() if line.startswith("  actor_update  "))
    assert update.split()[1:5] == ["0.3", "32.8", "0.7", "0.5"]
    assert "actor: adapters of rank 32, 268.4e6 parameters (0.8% of the model's)" in told
    assert "critic: adapters of rank 32 and a value head, 268.4e6 parameters" in told
    assert "base: one copy of 32.8 GB on each GPU, of actor, critic\n" in told
    pasted = tmp_path / "plan.yaml"
    pasted.write_text(to_paste(config))
    assert load_config(pasted).model.lora == config.model.lora
    assert not_modelled(config).startswith(not_modelled(VapoConfig()))


def test_without_adapters_nothing_is_said_of_them(shape):
    config = make_config()
    told = describe_plan(shape, make_plan(shape, config, Cluster(num_gpus=128), WORKLOAD))
    assert "adapters" not in told and "base" not in told
    assert "model" not in yaml.safe_load(to_paste(config))
    assert "adapters" not in not_modelled(config)


def test_training_all_weights_does_not_fit_and_adapters_are_proposed(shape):
    base = VapoConfig.model_validate({"parallel": {"world_size": 8, "sequence_parallel": False}})
    fixed = Fixed(tp=8, pp=1, vllm_tp=8, recompute="full", max_tokens=22528)
    ranking = rank(shape, base, NODE, workload_of(base), fixed)
    assert not ranking.plans
    assert "shorter sequences, set model.lora.rank=32, or fix" in describe_misfit(
        shape, ranking, NODE
    )[1]  # fmt: skip
    lora = base.model.model_copy(update={"lora": base.model.lora.model_copy(update={"rank": 32})})
    found = rank(shape, base.model_copy(update={"model": lora}), NODE, workload_of(base), fixed)
    assert found.plans
    # A run says the same, but not where adapters would not fit either, or are there already.
    config = make_config(8, 1, 1, vllm_tp=8, recompute="full")
    with pytest.raises(ConfigError, match="set model.lora.rank=32, or let vapo plan"):
        check_fits(config, shape, 70 * 10**9)
    for other, size in ((config, 20 * 10**9), (with_adapters(config), 20 * 10**9)):
        with pytest.raises(ConfigError) as error:
            check_fits(other, shape, size)
        assert "lora" not in str(error.value)
    dion = changed(config, optimizer={"actor_method": "dion"})
    with pytest.raises(ConfigError) as error:
        check_fits(dion, shape, 60 * 10**9)
    assert "lora" not in str(error.value)


def test_adapters_are_of_the_attention_in_a_mixture():
    found = adapters_of(known_shape("Qwen3-30B-A3B"), node(), "actor")
    assert found == Adapters(32, ("q_proj", "k_proj", "v_proj", "o_proj"))
