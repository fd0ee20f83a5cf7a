"""The memory planner against what torch's allocator gives out in real gloo processes.

Every allocation and release is counted by the profiler, but for gloo's own copies. Activations are
predicted with the CPU column of activations.py's table: what the columns have in common, the layers
in flight, the head and the backward pass are checked; the GPU column's own terms, NCCL and CUDA are
not, nor forward passes without gradients under sequence parallelism: what gloo's thread still holds
of gathered tensors when the next are made is up to a fifth of such a pass's peak, and differs.
"""

import dataclasses

import pytest

from tests.planning.measured import checkpoint_size, measure, offloaded
from tests.planning.shapes import small_shape
from vapo_megatron.config import VapoConfig
from vapo_megatron.models.hf_config import Experts
from vapo_megatron.planning import activations
from vapo_megatron.planning.host_memory import host_bytes
from vapo_megatron.planning.memory import checkpoint_bytes
from vapo_megatron.planning.model_bytes import all_base_bytes, base_bytes, state_bytes

TOKENS = 512
MICROBATCHES = 4
STATE_TOLERANCE = 0.02
TRAINING_TOLERANCE, INFERENCE_TOLERANCE = 0.2, 0.1
ADAPTED_TOLERANCE = 0.1

TP2_SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
PP2_VPP2 = {**PP2, "virtual_pipeline_model_parallel_size": 2}
DP2 = {"use_distributed_optimizer": True}
DP2_WHOLE = {"use_distributed_optimizer": False}

# layout, recompute, dtype, role, differences of the model
FEW = [
    (TP2, "full", "float32", "actor", {}),
    (PP2, "none", "bfloat16", "actor", {"tied": True}),
]
MANY = [
    (layout, recompute, dtype, role, {})
    for layout in (TP2_SP, TP2, PP2, PP2_VPP2, DP2, DP2_WHOLE)
    for recompute in ("none", "selective", "full")
    for dtype in ("bfloat16", "float32")
    for role in ("actor", "critic")
] + [
    (layout, recompute, dtype, "actor", differences)
    for layout in (TP2, DP2)
    for recompute in ("none", "selective")
    for dtype in ("bfloat16", "float32")
    for differences in ({"qk_norm": True, "qkv_bias": False}, {"num_key_value_heads": 1})
]


def _shape(**differences):
    sizes = {"hidden": 256, "layers": 4, "heads": 4, "kv_heads": 2, "head": 64, "ffn": 704}
    shape = small_shape(**sizes, vocab=1000)
    return dataclasses.replace(shape, **differences)


def _config(layout, recompute, dtype):
    dp_size = 2 if not {*layout} - {*DP2} else 1
    batch = MICROBATCHES * dp_size
    return VapoConfig.model_validate(
        {
            "model": {"dtype": dtype, "layer_spec": "local", "make_vocab_size_divisible_by": 16},
            "rollout": {"max_prompt_tokens": 2, "max_response_tokens": TOKENS - 2},
            "algorithm": {
                "responses_per_step": batch, "mini_batch_size": batch, "group_size": 1,
            },
            "parallel": {
                "world_size": 2,
                "recompute": recompute,
                "max_tokens_per_microbatch": TOKENS,
                "use_distributed_optimizer": False,
                **layout,
            },
        }
    )  # fmt: skip


def _states(workers, shape, config, role, microbatches, base_bytes=lambda **stage: 0):
    """What each rank has found, after its parameters, gradients and optimizer were compared.

    base_bytes: of parameters beside the state's, on a stage.
    """
    near = {"rel": STATE_TOLERANCE}
    everywhere = workers.run(2, measure, shape, config, role, microbatches, timeout_seconds=400)
    for rank, found in enumerate(everywhere):
        state = state_bytes(shape, config, role, pp_rank=found.pp_rank)
        parameters = state.parameters + base_bytes(pp_rank=found.pp_rank)
        assert parameters == pytest.approx(found.parameters, **near), rank
        assert state.gradients == pytest.approx(found.gradients, **near), rank
        assert state.optimizer == pytest.approx(found.optimizer, **near), rank
    return everywhere


def _check(workers, layout, recompute, dtype, role, differences):
    shape, config = _shape(**differences), _config(layout, recompute, dtype)
    for rank, found in enumerate(_states(workers, shape, config, role, MICROBATCHES)):
        stage = {"pp_rank": found.pp_rank, "tokens": TOKENS, "on_cpu": True}
        passes = activations.Passes(shape, config, role, **stage)
        training, inference = sum(passes.training()), sum(passes.inference())
        assert training == pytest.approx(found.training, rel=TRAINING_TOLERANCE), rank
        if layout is not TP2_SP:
            assert inference == pytest.approx(found.inference, rel=INFERENCE_TOLERANCE), rank


@pytest.mark.parametrize("case", FEW, ids=["tp2", "pp2"])
def test_prediction_is_what_is_allocated(workers, case):
    _check(workers, *case)


@pytest.mark.slow
@pytest.mark.parametrize("case", MANY, ids=str)
def test_prediction_is_what_is_allocated_in_every_mode(workers, case):
    _check(workers, *case)


MATRICES = [
    (DP2, "float32", "dion"),
    *(
        pytest.param((layout, dtype, method), marks=pytest.mark.slow)
        for layout in (DP2, TP2, PP2)
        for dtype in ("bfloat16", "float32")
        for method in ("dion", "muon")
    ),
]


@pytest.mark.parametrize("case", MATRICES, ids=str)
def test_owners_of_matrices_have_what_is_predicted(workers, case):
    """One of the ranks of a stage that hold the same has what is predicted, the others no more."""
    layout, dtype, method = case
    config = _with_method(_config({**layout, **DP2}, "none", dtype), method)
    shape = _shape()
    everywhere = workers.run(2, measure, shape, config, "actor", 1, timeout_seconds=400)
    for stage in {found.pp_rank for found in everywhere}:
        state = state_bytes(shape, config, "actor", pp_rank=stage)
        of_stage = [found for found in everywhere if found.pp_rank == stage]
        near = {"rel": STATE_TOLERANCE}
        assert max(f.optimizer for f in of_stage) == pytest.approx(state.optimizer, **near)
        for found in of_stage:
            assert found.parameters == pytest.approx(state.parameters, **near)
            assert found.gradients == pytest.approx(state.gradients, **near)


EXPERTS = Experts(8, 2, 128, normalized=True, layers=(0, 2, 3))
WITH_EXPERTS = [
    ({**DP2, "expert_model_parallel_size": 2}, "float32"),
    *(
        pytest.param((layout, dtype), marks=pytest.mark.slow)
        for layout in (
            DP2, DP2_WHOLE, {**DP2_WHOLE, "expert_model_parallel_size": 2}, TP2_SP,
            {**TP2_SP, **DP2}, {**TP2_SP, "expert_model_parallel_size": 2},
            {**PP2, **DP2},
        )
        for dtype in ("bfloat16", "float32")
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", WITH_EXPERTS, ids=str)
def test_experts_take_what_is_predicted(workers, case):
    layout, dtype = case
    shape, config = _shape(experts=EXPERTS), _config(layout, "none", dtype)
    assert len(_states(workers, shape, config, "actor", 1)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("layout", [DP2, {**DP2, "expert_model_parallel_size": 2}], ids=str)
def test_checkpoints_with_experts_have_the_predicted_size(workers, tmp_path, layout):
    config = _config(layout, "none", "bfloat16")
    _check_checkpoint(workers, tmp_path, config, _shape(experts=EXPERTS))


def _check_checkpoint(workers, tmp_path, config, shape=None, tolerance=STATE_TOLERANCE):
    shape = shape or _shape()
    sizes = workers.run(2, checkpoint_size, shape, config, str(tmp_path), timeout_seconds=400)
    assert checkpoint_bytes(shape, config) == pytest.approx(sizes[0], rel=tolerance)


def _with_adapters(config, **lora):
    fields = {"rank": 32, **lora}
    return VapoConfig.model_validate(
        {**config.model_dump(), "model": {**config.model.model_dump(), "lora": fields}}
    )


SOME = {"rank": 16, "targets": ["q_proj", "v_proj", "up_proj"]}
APART = {"share_base": False}
ADAPTED = [
    (TP2_SP, "none", "bfloat16", "critic", {}),
    *(
        pytest.param(case, marks=pytest.mark.slow)
        for case in (
            (TP2_SP, "full", "bfloat16", "actor", {}),
            (TP2_SP, "none", "bfloat16", "actor", {}),
            (TP2_SP, "full", "bfloat16", "critic", APART),
            (TP2_SP, "selective", "float32", "actor", SOME),
            (TP2, "none", "bfloat16", "actor", SOME),
            (TP2, "none", "float32", "actor", SOME),
            (TP2, "full", "float32", "critic", {**APART, **SOME}),
            (PP2, "none", "float32", "critic", SOME),
            (PP2_VPP2, "none", "float32", "actor", SOME),
            (DP2, "full", "float32", "critic", {}),
            (DP2, "none", "bfloat16", "actor", {}),
            (DP2, "none", "float32", "actor", {"targets": ["o_proj", "down_proj"]}),
            (DP2_WHOLE, "none", "float32", "actor", SOME),
        )
    ),
]


@pytest.mark.parametrize("case", ADAPTED, ids=str)
def test_adapters_take_what_is_predicted(workers, case):
    """A base that is shared is there before; it has no gradients and no optimizer."""
    layout, recompute, dtype, role, lora = case
    shape, config = _shape(), _with_adapters(_config(layout, recompute, dtype), **lora)

    def own_base(**stage):
        return 0 if config.model.lora.shares(role) else base_bytes(shape, config, role, **stage)

    for rank, found in enumerate(_states(workers, shape, config, role, MICROBATCHES, own_base)):
        stage = {"pp_rank": found.pp_rank, "tokens": TOKENS, "on_cpu": True}
        passes = activations.Passes(shape, config, role, **stage)
        near = {"rel": ADAPTED_TOLERANCE}
        assert sum(passes.training()) == pytest.approx(found.training, **near), rank
        assert sum(passes.inference()) == pytest.approx(found.inference, **near), rank


@pytest.mark.parametrize(
    "lora",
    [{}, pytest.param(APART, marks=pytest.mark.slow), pytest.param(SOME, marks=pytest.mark.slow)],
    ids=str,
)
def test_a_shared_base_is_offloaded_once(workers, lora):
    config = _with_adapters(_config(TP2_SP, "none", "bfloat16"), **lora)
    algorithm = config.algorithm.model_copy(update={"kl_coef": 0.1})
    config, shape = config.model_copy(update={"algorithm": algorithm}), _shape()
    where = {"pp_rank": 0, "is_first_replica": True, "keeps_rollouts": False}
    planned = host_bytes(shape, config, is_offloaded=True, **where).offloaded
    for found in workers.run(2, offloaded, shape, config, timeout_seconds=400):
        assert planned == pytest.approx(found.own + found.base, rel=STATE_TOLERANCE)
        assert all_base_bytes(shape, config, pp_rank=0) == found.base


@pytest.mark.parametrize(
    "layout", [TP2_SP, *(pytest.param(x, marks=pytest.mark.slow) for x in (DP2, DP2_WHOLE, PP2))],
    ids=str,
)  # fmt: skip
def test_checkpoints_with_adapters_have_the_predicted_size(workers, tmp_path, layout):
    config = _with_adapters(_config(layout, "none", "bfloat16"))
    _check_checkpoint(workers, tmp_path, config, tolerance=ADAPTED_TOLERANCE)


def _with_method(config, method):
    methods = {"actor_method": method, "critic_method": method}
    return config.model_copy(update={"optimizer": config.optimizer.model_copy(update=methods)})


@pytest.mark.slow
@pytest.mark.parametrize("layout", [DP2, TP2, PP2], ids=str)
@pytest.mark.parametrize("method", ["dion", "muon"])
def test_checkpoints_with_matrices_have_the_predicted_size(workers, tmp_path, layout, method):
    config = _with_method(_config({**layout, **DP2}, "none", "bfloat16"), method)
    _check_checkpoint(workers, tmp_path, config)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [DP2, DP2_WHOLE, TP2, PP2], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_checkpoints_have_the_predicted_size(workers, tmp_path, layout, dtype):
    _check_checkpoint(workers, tmp_path, _config(layout, "none", dtype))
