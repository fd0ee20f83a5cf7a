"""The phases' bytes: golden numbers by hand for Qwen2.5-32B.

Not exercised: any GPU: the constants of memory.py are from sources and code. What the phases are
made of is in test_model_bytes.py and test_activations.py.
"""

import dataclasses

import pytest

from tests.planning.shapes import GPU_BYTES, LAYER, VOCABULARY, changed, make_config
from vapo_megatron.models.known import known_shape
from vapo_megatron.parallel import score_chunks
from vapo_megatron.planning import logprobs, memory, model_bytes, plan
from vapo_megatron.planning.host_memory import host_bytes_per_node
from vapo_megatron.planning.memory import checkpoint_bytes


def test_generation_of_32b(shape):
    # A layer of vLLM on 4 ranks: (1280 + 2 * 256) * 5120 + 1792 + 1280 * 5120 + 3 * 6912 * 5120
    # + 2 * 5120 = 121908992; 64 of them, the norm, and 152064 / 4 = 38016 rows twice.
    weights = 2 * (64 * 121_908_992 + 5120 + 2 * 38016 * 5120)
    phase = memory.phase_memory(shape, make_config(), gpu_bytes=GPU_BYTES, pp_rank=0)["generation"]
    assert phase.engine_weights == weights == 16_382_928_896
    # 16384 tokens of 2 * 5120 + 3 * 6912 elements; 256 sequences of 152064 * 24 bytes.
    assert phase.activations == 16384 * 30976 * 2
    assert phase.logits == 934_281_216
    used = weights + phase.activations + phase.logits + 500_000_000 + 1_503_657_984
    assert phase.kv_cache == GPU_BYTES // 2 - used
    assert (phase.parameters, phase.gradients, phase.optimizer) == (0, 0, 0)
    # 2 * 64 layers * 2 key-value heads * 128 * 2 bytes
    assert memory.kv_cache_bytes_per_token(shape, make_config()) == 65_536
    tokens = memory.kv_cache_tokens(shape, make_config(), gpu_bytes=GPU_BYTES)
    assert tokens == phase.kv_cache // (16 * 65_536) * 16


def test_kv_cache_follows_its_settings(shape):
    def tokens(**rollout):
        config = make_config(rollout=rollout)
        return memory.kv_cache_tokens(shape, config, gpu_bytes=GPU_BYTES)

    assert tokens(kv_cache_bytes=2**30) == 2**30 // 65_536
    assert tokens(gpu_memory_utilization=0.2) == 0  # 16 GB: not even the weights
    more = tokens(enforce_eager=True) - tokens()
    assert more * 65_536 == pytest.approx(memory.CUDA_GRAPH_BYTES, rel=1e-3)
    # A smaller GPU makes vLLM take half as many tokens at once.
    phases = [
        memory.phase_memory(shape, make_config(), gpu_bytes=size, pp_rank=0)["generation"]
        for size in (70 * 2**30, 70 * 2**30 - 1)
    ]
    assert phases[0].activations == 2 * phases[1].activations
    wide = make_config(rollout={"dtype": "float32"})
    assert memory.kv_cache_bytes_per_token(shape, wide) == 2 * 65_536
    phase = memory.phase_memory(shape, wide, gpu_bytes=GPU_BYTES, pp_rank=0)["generation"]
    assert phase.activations == 2 * phases[0].activations
    # One key-value head for each of 16 ranks, though there are 8.
    wide = make_config(16, 2, 4, vllm_tp=16)
    assert memory.kv_cache_bytes_per_token(shape, wide) == 2 * 64 * 128 * 2


def test_what_is_not_at_work_leaves_the_gpu(shape):
    # Parameters of stage 0: 2 n of each role; 9 n while one trains.
    n = 16 * LAYER + VOCABULARY
    # The reward model is Qwen2.5-14B: feed-forward 13824 / 8 = 1728 in place of 3456, 12 layers.
    m = 12 * (LAYER - 3 * 1728 * 5120) + VOCABULARY
    config = make_config(algorithm={"kl_coef": 0.1}, model={"reward_hf_path": "Qwen2.5-14B"})
    phases = memory.phase_memory(shape, config, gpu_bytes=GPU_BYTES, pp_rank=0)
    assert tuple(phases) == memory.PHASES
    states = {x: (p.parameters, p.gradients, p.optimizer) for x, p in phases.items()}
    assert states == {
        "generation": (0, 0, 0),
        "reward_scores": (2 * m, 0, 0),
        "values": (2 * n, 0, 0),
        "logprobs": (2 * n, 0, 0),
        "reference_logprobs": (2 * n, 0, 0),
        "critic_update": (2 * n, 4 * n, 3 * n),
        "actor_update": (2 * n, 4 * n, 3 * n),
        "sync": (2 * n, 0, 0),
    }
    assert [x for x, p in phases.items() if p.kv_cache] == ["generation"]
    assert [x for x, p in phases.items() if p.engine_weights] == ["generation", "sync"]
    # Two pairs of buckets of 512 MiB.
    assert [p.sync_buckets for p in phases.values()] == [0] * 7 + [2**31]
    for scores in ("logprobs", "reference_logprobs"):
        last = memory.phase_memory(shape, config, gpu_bytes=GPU_BYTES, pp_rank=3)[scores]
        assert last.logits > 0
    last = memory.phase_memory(shape, config, gpu_bytes=GPU_BYTES, pp_rank=3)["reward_scores"]
    # A norm and a head of 5120 each in place of the embedding.
    assert last.logits == 0 and last.parameters == 2 * (m - VOCABULARY + 2 * 5120)
    # On the host the reference and the reward model have their parameters alone.
    without = host_bytes_per_node(shape, make_config(), gpus_per_node=8)
    more = host_bytes_per_node(shape, config, gpus_per_node=8)
    assert more.offloaded - without.offloaded == 8 * 2 * (n + m)
    assert more.checkpoint == without.checkpoint, "which does not hold it"


def test_without_offload_everything_stays(shape):
    n = 16 * LAYER + VOCABULARY
    away = memory.phase_memory(shape, make_config(), gpu_bytes=GPU_BYTES, pp_rank=0)
    config = make_config(offload=False)
    phases = memory.phase_memory(shape, config, gpu_bytes=GPU_BYTES, pp_rank=0)
    for name, phase in phases.items():
        assert (phase.parameters, phase.gradients, phase.optimizer) == (4 * n, 8 * n, 6 * n)
        assert phase.engine_weights == away["generation"].engine_weights
        assert phase.kv_cache == away["generation"].kv_cache > 0
        assert (phase.activations, phase.logits) == (away[name].activations, away[name].logits)
    assert host_bytes_per_node(shape, config, gpus_per_node=8).offloaded == 0


def test_without_a_critic_there_is_half_of_it(shape):
    n = 16 * LAYER + VOCABULARY
    group = {"advantage_estimator": "grpo", "value_pretraining_steps": 0}
    for offload in (True, False):
        config = changed(make_config(offload=offload), algorithm=group)
        phases = memory.phase_memory(shape, config, gpu_bytes=GPU_BYTES, pp_rank=0)
        assert set(phases) == {"generation", "logprobs", "actor_update", "sync"}
        update = phases["actor_update"]
        assert (update.parameters, update.gradients, update.optimizer) == (2 * n, 4 * n, 3 * n)
        host = host_bytes_per_node(shape, config, gpus_per_node=8)
        # The actor's last stage has a norm more.
        assert host.offloaded == (8 * 5 * (n + 5120) if offload else 0)
        assert host.checkpoint == 8 * 14 * (n + 5120)
    assert checkpoint_bytes(shape, config) == 14 * 32_769_119_232


def test_reserve(shape):
    phases = memory.phase_memory(shape, make_config(), gpu_bytes=GPU_BYTES, pp_rank=0)
    # TP, PP, DP, TP x PP, the world, and two of vLLM's; 7 neighbours; context and graphs; and
    # Transformer Engine's dummies of a layer's gradients: 896 x 5120, 5120 x 640, 6912 x 5120
    # and 5120 x 3456 numbers of 2 bytes.
    kept = 2 * 5120 * (896 + 640 + 6912 + 3456)
    assert kept == 121_896_960
    fixed = 7 * 688 * 2**20 + 7 * (3_280_000_000 // 7) + 500_000_000 + 1_503_657_984 + kept
    assert phases["sync"].reserve == phases["generation"].reserve == fixed
    update = phases["actor_update"]
    assert update.reserve == fixed + int(0.15 * update.activations)
    alone = known_shape("Qwen2.5-0.5B")
    config = make_config(1, 1, 1, vllm_tp=1, rollout={"enforce_eager": True})
    assert memory.phase_memory(alone, config, gpu_bytes=GPU_BYTES, pp_rank=0)["sync"] == (
        memory.PhaseMemory(
            parameters=model_bytes.state_bytes(alone, config, "actor", pp_rank=0).parameters,
            engine_weights=model_bytes.engine_weight_bytes(alone, config),
            # 1152 and 896, 9728 and 4864 rows or columns of 896.
            reserve=500_000_000 + 2 * 896 * (1152 + 896 + 9728 + 4864),
        )
    )


def test_dummy_gradients_are_kept_where_transformer_engine_trains(shape):
    def kept(**sections):
        return model_bytes.dummy_gradient_bytes(shape, make_config(**sections))

    assert kept() == 121_896_960
    assert kept(model={"layer_spec": "local"}) == kept(model={"dtype": "float32"}) == 0
    # 7B on one GPU, as on paper: half a GB.
    seven = model_bytes.dummy_gradient_bytes(known_shape("Qwen2.5-7B"), make_config(1, 1, 1))
    assert seven == 2 * 3584 * (4608 + 3584 + 2 * 18944 + 18944)
    apart = {"placement": "disaggregated", "num_processes": 4}
    phases = (
        memory.phase_memory(
            shape, make_config(rollout=apart, model=model), gpu_bytes=GPU_BYTES, pp_rank=0
        )
        for model in ({}, {"layer_spec": "local"})
    )
    te, local = phases
    assert te["generation"] == local["generation"], "a rollout worker has none"
    assert te["sync"].reserve - local["sync"].reserve == 121_896_960


def test_cuda_graphs_may_leave_the_gpu_with_vllm(shape):
    offloaded = {"vllm_args": {"sleep_mode_offload_cudagraph": True}}
    before, after, kept = (
        memory.phase_memory(shape, config, gpu_bytes=GPU_BYTES, pp_rank=0)
        for config in (
            make_config(), make_config(rollout=offloaded),
            make_config(rollout=offloaded, offload=False),
        )
    )  # fmt: skip
    assert before["sync"].reserve - after["sync"].reserve == memory.CUDA_GRAPH_BYTES
    assert before["generation"] == after["generation"]
    assert kept["sync"].reserve == before["sync"].reserve


def test_fp8_halves_the_keys_and_values(shape):
    fp8 = make_config(rollout={"kv_cache_dtype": "fp8"})
    assert memory.kv_cache_bytes_per_token(shape, fp8) == 32_768
    narrow, wide = (
        memory.kv_cache_tokens(shape, config, gpu_bytes=GPU_BYTES)
        for config in (fp8, make_config())
    )
    assert 2 * wide <= narrow < 2 * wide + 32


def test_total_is_the_sum_of_the_parts():
    names = [f.name for f in dataclasses.fields(memory.PhaseMemory)]
    phase = memory.PhaseMemory(**{name: 10**i for i, name in enumerate(names)})
    assert phase.total == 1_111_111_111


def test_the_first_stage_has_most_in_flight_and_the_last_the_logprobs(shape):
    first, last = (
        memory.phase_memory(shape, make_config(), gpu_bytes=GPU_BYTES, pp_rank=rank)
        for rank in (0, 3)
    )
    worst = plan.peak_memory(shape, make_config(), GPU_BYTES)
    assert worst["critic_update"] == first["critic_update"] != last["critic_update"]
    assert worst["logprobs"] == last["logprobs"] != first["logprobs"]


def test_step_of_torchs_adam_needs_room(shape):
    # 4 n / 4 bytes of square roots; with few tokens that is more than the activations.
    tokens = {"max_prompt_tokens": 8, "max_response_tokens": 56}
    small = {"max_tokens_per_microbatch": 64, "rollout": tokens}
    local = make_config(model={"layer_spec": "local"}, **small)
    phases = memory.phase_memory(shape, local, gpu_bytes=GPU_BYTES, pp_rank=1)
    assert phases["actor_update"].activations == 16 * LAYER
    fused = memory.phase_memory(shape, make_config(**small), gpu_bytes=GPU_BYTES, pp_rank=1)
    assert fused["actor_update"].activations < 16 * LAYER // 2


def test_host_memory_of_a_node(shape):
    # 8 GPUs of the first stage: of each role 2 n of parameters and 3 n of optimizer state.
    n = 16 * LAYER + VOCABULARY
    found = host_bytes_per_node(shape, make_config(), gpus_per_node=8)
    # They are the first replica's, too: 2 n of parameters and 12 n of optimizer state, not shared.
    assert found[:2] == (8 * 2 * 5 * n, 8 * 2 * 14 * n) == (85_840_199_680, 240_352_559_104)
    # 2048 of 8192 responses of 20480 tokens, with prompts of 2048; two vLLM replicas of 32.
    batch = 24 * 2048 * 22528 + 38 * 2048 * 20480
    assert found.step == 8 * batch + 2 * 12 * 256 * 20480 == 21_734_883_328
    one = make_config(1, 1, 1, vllm_tp=1)
    small = known_shape("Qwen2.5-0.5B")
    assert host_bytes_per_node(small, one, gpus_per_node=8).offloaded == sum(
        s.parameters + s.optimizer
        for s in (
            model_bytes.state_bytes(small, one, role, pp_rank=0) for role in ("actor", "critic")
        )
    )


def test_host_memory_of_a_checkpoint_by_layout(shape):
    def held(*sizes, asynchronous=True, **fields):
        checkpoint = {"asynchronous": asynchronous}
        config = changed(make_config(*sizes, **fields), checkpoint=checkpoint)
        return host_bytes_per_node(shape, config, gpus_per_node=8).checkpoint

    # TP 8: a node is one replica's, and the first one's is the fullest.
    n = 16 * LAYER + VOCABULARY
    assert held() == 8 * 2 * 14 * n
    assert held(asynchronous=False) == 8 * 12 * n
    whole = {"use_distributed_optimizer": False}
    assert held(**whole) == 8 * 2 * 14 * n
    assert held(asynchronous=False, **whole) == 0
    wide = {"model": {"dtype": "float32"}}
    assert held(**wide) == 8 * 2 * 16 * n and held(**wide, **whole) == 8 * 2 * 12 * n
    # TP 2 x DP 4: two of a node's GPUs copy, and six hold what is gathered of a role; x PP 4.
    copies, gathered = held(2, 4, 1, **whole) / 8, held(2, 4, 1, asynchronous=False) / 8
    assert held(2, 4, 4) == 2 * copies + 6 * gathered
    # TP 2 x DP 2: two stages on a node, so four copy.
    assert held(2, 4, 2) == 4 * copies + 4 * gathered
    # TP 2 x DP 3: of the ranks 0, 1, 6, 7 on the first node.
    assert held(2, 4, 3) == 4 * copies + 4 * gathered


def test_checkpoint_of_32b(shape):
    # A layer has 487605248 parameters, the padded vocabulary 152576 * 5120 = 781189120.
    # actor   64 * 487605248 + 5120 + 2 * 781189120        = 32769119232
    # critic  64 * 487605248 + 5120 + 781189120 + 5120     = 31987935232
    # 14 bytes each: bfloat16, and float32 main parameters and two moments.
    elements = 32_769_119_232 + 31_987_935_232
    assert checkpoint_bytes(shape, make_config()) == 14 * elements == 906_598_762_496
    # Of float32 parameters the distributed optimizer writes its shards again.
    wide = make_config(model={"dtype": "float32"})
    assert checkpoint_bytes(shape, wide) == 16 * elements
    whole = make_config(model={"dtype": "float32"}, use_distributed_optimizer=False)
    assert checkpoint_bytes(shape, whole) == 12 * elements


def test_constants_are_those_of_the_files_that_load_torch():
    for name in ("CPU_CHUNK_BYTES", "GPU_CHUNK_BYTES", "GPU_CHUNK_ROWS", "SLAB_BYTES"):
        assert getattr(logprobs, name) == getattr(score_chunks, name)


def test_fp8_copies_stay(shape):
    # A layer's matrices on one of 8 ranks: 896 * 5120 + 5120 * 640 + 3 * 3456 * 5120 = 60948480;
    # 16 layers of a stage, a byte for each copy and its transpose, of actor and critic.
    plain, copied = (
        memory.phase_memory(shape, make_config(model=model), gpu_bytes=GPU_BYTES, pp_rank=1)
        for model in ({}, {"fp8": "hybrid"})
    )
    for name in plain:
        assert copied[name].total - plain[name].total == 2 * 2 * 16 * 60_948_480
