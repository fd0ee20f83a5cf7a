"""Plans as a whole: memory, time, ranking, rejections, and what is printed.

The bytes' own tests are in test_memory.py, the seconds' in test_roofline.py.
"""

import dataclasses
import itertools
import re
import sys
import types

import pytest
import yaml

from tests.planning.shapes import changed
from tests.planning.test_ranking import base
from vapo_megatron.cli import preflight, train
from vapo_megatron.config import VapoConfig, load_config
from vapo_megatron.errors import ConfigError
from vapo_megatron.models.known import known_shape
from vapo_megatron.parallel import libraries
from vapo_megatron.planning import memory
from vapo_megatron.planning.cluster import Cluster
from vapo_megatron.planning.describe import (
    describe_plan,
    describe_ranking,
    dry_run_comment,
    to_paste,
)
from vapo_megatron.planning.host_memory import batch_bytes, step_host_bytes
from vapo_megatron.planning.misfits import check_fits, find_misfit
from vapo_megatron.planning.plan import (
    PUBLISHED_OVER_PREDICTED,
    make_plan,
    model_flops,
    peak_memory,
)
from vapo_megatron.planning.ranking import (
    Fixed,
    rank,
    trainer_layouts,
    variants,
    with_parallel,
    with_rollout,
)
from vapo_megatron.planning.workload import workload_of
from vapo_megatron.rollout.inputs import Inputs

SMALL, SMALL_SHAPE = Cluster(num_gpus=8), known_shape("Qwen2.5-7B")
SMALL_BASE = base(8, responses_per_step=256, mini_batch_size=64)
RECIPE = ["examples/configs/qwen2.5_base.yaml", "examples/configs/qwen2.5_32b.yaml"]


def ranked(fixed=Fixed(), cluster=SMALL):  # noqa: B008
    return rank(SMALL_SHAPE, SMALL_BASE, cluster, workload_of(SMALL_BASE), fixed)


def planned(config, workload=None, cluster=SMALL):
    return make_plan(SMALL_SHAPE, config, cluster, workload or workload_of(config))


@pytest.fixture(scope="module")
def ranking():
    return ranked()


def test_the_fastest_first_and_all_fit(ranking):
    seconds = [plan.step_seconds for plan in ranking.plans]
    assert len(seconds) > 10 and seconds == sorted(seconds)
    for plan in ranking.plans:
        assert plan.peak[1].total <= SMALL.gpu_bytes
        assert plan.kv_cache_tokens >= 2048 + 20480
        assert plan.step_seconds == pytest.approx(sum(plan.seconds.values()))
    layouts = [
        (p.tensor_model_parallel_size, p.pipeline_model_parallel_size, s)
        for p, s in (
            (x.config.parallel, x.config.rollout.tensor_model_parallel_size) for x in ranking.plans
        )
    ]
    assert len(set(layouts)) == len(layouts)


def test_the_best_of_a_layout_is_the_best_of_all_its_variants(ranking):
    """The ranking leaves variants out that cannot win; here none is left out."""
    fixed = Fixed(tp=2, pp=2)
    (layout,), _ = trainer_layouts(SMALL_SHAPE, SMALL_BASE, fixed, 8)
    workload = workload_of(SMALL_BASE)
    best = {}
    shares = [round(0.05 * n, 2) for n in range(1, 19)]
    for variant, size, share in itertools.product(
        variants(SMALL_SHAPE, layout, fixed), (1, 4), shares
    ):
        config = with_rollout(
            variant, tensor_model_parallel_size=size, gpu_memory_utilization=share
        )
        phases = peak_memory(SMALL_SHAPE, config, SMALL.gpu_bytes)
        if find_misfit(SMALL_SHAPE, config, SMALL, phases) is None:
            seconds = make_plan(SMALL_SHAPE, config, SMALL, workload, phases=phases).step_seconds
            best[size] = min(seconds, best.get(size, seconds))
    found = {
        plan.config.rollout.tensor_model_parallel_size: plan.step_seconds
        for plan in ranking.plans
        if plan.config.parallel.tensor_model_parallel_size == 2
        and plan.config.parallel.pipeline_model_parallel_size == 2
    }
    assert {size: found[size] for size in best} == pytest.approx(best) and len(best) == 2


def test_more_memory_is_never_slower(ranking):
    larger = dataclasses.replace(SMALL, gpu_bytes=141 * 10**9)
    after = ranked(cluster=larger)
    assert after.plans[0].step_seconds <= ranking.plans[0].step_seconds
    assert len(after.plans) >= len(ranking.plans) and len(after.rejected) <= len(ranking.rejected)


def test_chosen_chunks_refuse_layouts_without_a_pipeline_and_search_the_others():
    fixed = Fixed(tp=2, vpp=2, recompute="full")
    found = ranked(fixed)
    layouts = {
        (p.pipeline_model_parallel_size, p.virtual_pipeline_model_parallel_size)
        for p in (plan.config.parallel for plan in found.plans)
    }
    # 28 layers.
    assert layouts == {(2, 2)}
    assert "needs parallel.pipeline_model_parallel_size > 1" in found.rejected["TP 2 x PP 1"]
    assert "must divide the model's num_hidden_layers=28" in found.rejected["TP 2 x PP 4"]


def test_what_does_not_fit_says_why():
    little = dataclasses.replace(SMALL, gpu_bytes=20 * 10**9)
    found = ranked(Fixed(tp=1), little)
    assert not found.plans
    assert found.rejected["TP 1 x PP 1"].split(" needs ")[0] in memory.PHASES
    assert "GB of 20.0 (gradients 30.5; parameters 15.2" in found.rejected["TP 1 x PP 1"]


@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize("vpp_size", [None, 2])
@pytest.mark.parametrize(("tp_size", "pp_size"), [(1, 4), (2, 2), (4, 8)])
def test_the_first_or_the_last_stage_is_the_fullest(tp_size, pp_size, vpp_size, offload):
    shape = known_shape("Qwen2.5-32B")
    fields = {
        "tensor_model_parallel_size": tp_size,
        "pipeline_model_parallel_size": pp_size,
        "virtual_pipeline_model_parallel_size": vpp_size,
        "offload": offload,
    }
    for recompute in ("none", "full"):
        one = with_parallel(base(32), **fields, recompute=recompute)
        found = peak_memory(shape, one, SMALL.gpu_bytes)
        everywhere = [
            memory.phase_memory(shape, one, gpu_bytes=SMALL.gpu_bytes, pp_rank=stage)
            for stage in range(pp_size)
        ]
        for name in found:
            assert found[name].total == max(stage[name].total for stage in everywhere)


def with_reward_model(config, name):
    return changed(config, model={"reward_hf_path": name})


def test_a_reward_model_limits_the_layouts():
    """Qwen2.5-7B has 28 heads, which 8 ranks do not divide; and its 28 layers have no third."""
    shape, config = known_shape("Llama-3.1-8B"), SMALL_BASE
    alone, _ = trainer_layouts(shape, config, Fixed(tp=8), 8)
    assert alone
    scored = with_reward_model(config, "Qwen2.5-7B")
    found, rejected = trainer_layouts(shape, scored, Fixed(tp=8), 8)
    assert not found
    assert "model.reward_hf_path=Qwen2.5-7B: parallel.tensor_model" in rejected["TP 8 x PP 1"]
    # 32 and 28 layers on 2 stages: 16 of four chunks, but 14 of two.
    (layout,), _ = trainer_layouts(shape, scored, Fixed(tp=4, pp=2), 8)
    chunks = {
        c.parallel.virtual_pipeline_model_parallel_size for c in variants(shape, layout, Fixed())
    }
    assert chunks == {None, 2}


def test_a_critic_costs_its_phases():
    workload = workload_of(SMALL_BASE)
    config = with_parallel(SMALL_BASE, offload=True)
    group = {"advantage_estimator": "grpo", "value_pretraining_steps": 0}
    critic_free = changed(config, algorithm=group)
    alone = workload_of(critic_free)
    both = planned(config, workload)
    one = planned(critic_free, alone)
    assert set(both.seconds) - set(one.seconds) == {"values", "critic_update"}
    assert set(one.memory) == {"generation", "logprobs", "actor_update", "sync"}
    assert one.training.offload_seconds == pytest.approx(both.training.offload_seconds / 2, rel=0.1)
    referring = changed(critic_free, algorithm={"kl_coef": 0.1})
    two = planned(referring)
    assert set(two.seconds) - set(one.seconds) == {"reference_logprobs"}
    assert two.seconds["reference_logprobs"] == two.seconds["logprobs"] == one.seconds["logprobs"]
    scored = with_reward_model(critic_free, "Qwen2.5-7B")
    two = planned(scored, alone)
    assert set(two.seconds) - set(one.seconds) == {"reward_scores"}
    assert two.seconds["reward_scores"] == both.seconds["values"]
    smaller = planned(with_reward_model(scored, "Qwen2.5-1.5B"), alone)
    assert smaller.seconds["reward_scores"] < 0.3 * two.seconds["reward_scores"]
    passes = dataclasses.replace(workload, critic_updates_per_step=3)
    once, thrice, actor = (
        model_flops(SMALL_SHAPE, SMALL_BASE, w) for w in (workload, passes, alone)
    )
    assert thrice - actor == 3 * (once - actor)
    # Value head and output projection apart, critic and actor train on the same products.
    assert (
        1.8
        < model_flops(SMALL_SHAPE, SMALL_BASE, workload)
        / model_flops(SMALL_SHAPE, SMALL_BASE, alone)
        < 2
    )
    pretraining = dataclasses.replace(workload, trained_roles=("critic",))
    assert model_flops(SMALL_SHAPE, SMALL_BASE, pretraining) == once - actor, (
        "the policy stands still"
    )


def given(config):
    """The configuration with responses that the data give."""
    algorithm = {"policy_loss": "none", "advantage_estimator": "none", "group_size": 1}
    return changed(
        config,
        data={"response_column": "response"},
        algorithm={**algorithm, "value_pretraining_steps": 0},
    )


def test_given_responses_are_an_update_alone():
    sampled = changed(
        with_parallel(SMALL_BASE, offload=True, recompute="full"),
        algorithm={"advantage_estimator": "grpo", "value_pretraining_steps": 0},
    )
    config = given(sampled)
    one, other = planned(config), planned(sampled)
    assert set(one.seconds) == {"actor_update", "offload"} and one.generation is None
    assert one.seconds["actor_update"] == other.seconds["actor_update"]
    # 2 bytes and an eighth of 12 there and back, without 2 for the scores.
    copies = one.training.offload_seconds / other.training.offload_seconds
    assert copies == pytest.approx(7 / 9)
    assert one.step_seconds == sum(one.seconds.values())
    assert set(one.memory) == {"actor_update"} and one.kv_cache_tokens == 0
    difference = other.memory["actor_update"].reserve - one.memory["actor_update"].reserve
    assert difference == memory.CUDA_GRAPH_BYTES
    resident = peak_memory(SMALL_SHAPE, with_parallel(config, offload=False), SMALL.gpu_bytes)
    assert resident["actor_update"].kv_cache == resident["actor_update"].engine_weights == 0
    # A share of vLLM's that would leave it no cache is a misfit only where there is vLLM.
    for both, fits in ((sampled, False), (config, True)):
        tight = with_rollout(both, gpu_memory_utilization=0.01)
        tight = with_parallel(tight, tensor_model_parallel_size=2, sequence_parallel=True)
        phases = peak_memory(SMALL_SHAPE, tight, SMALL.gpu_bytes)
        misfit = find_misfit(SMALL_SHAPE, tight, SMALL, phases)
        assert misfit is None if fits else "KV cache" in misfit.reason


def test_given_responses_in_host_memory_by_hand():
    # 256 responses on 8 ranks; 12 bytes a token of a rank's 32, and the batch.
    config = with_parallel(given(SMALL_BASE), world_size=8)
    prompt, response = config.rollout.max_prompt_tokens, config.rollout.max_response_tokens
    batch = batch_bytes(config, 32 * (prompt + response), 32 * response)
    for keeps in (False, True):
        found = step_host_bytes(config, keeps_rollouts=keeps)
        assert found == 32 * response * 12 + batch


def test_layouts_for_given_responses_are_ranked_without_vllm():
    config = given(SMALL_BASE)
    found = rank(SMALL_SHAPE, config, SMALL, workload_of(config), Fixed())
    assert {p.config.rollout.tensor_model_parallel_size for p in found.plans} == {1}
    table = describe_ranking(found, 3)
    head, first, *_ = table.splitlines()
    assert "sample" not in head.split() and "sync" not in head.split() and " - " in first
    text = describe_plan(SMALL_SHAPE, found.plans[0])
    assert ", responses given: " in text and "vLLM: KV cache" not in text
    assert "generation" not in text and "logprobs" not in text
    pasted = yaml.safe_load(to_paste(found.plans[0].config))
    assert set(pasted["rollout"]) == {"max_prompt_tokens", "max_response_tokens"}


def test_copies_to_hosts_by_hand():
    # bfloat16 on one GPU: 2 bytes of parameters, 12 of optimizer, of 7.6e9 and 7.1e9 parameters.
    # Each role: 2 for its scores, 2 + 12 there and back for its updates: 30 bytes.
    config = with_parallel(base(1, responses_per_step=64, mini_batch_size=64), offload=True)
    cluster = dataclasses.replace(
        Cluster(num_gpus=1, gpus_per_node=1), pcie_gb_per_second=1.0, pcie_share=1.0
    )
    plan = planned(config, cluster=cluster)
    assert plan.training.offload_seconds == pytest.approx(30 * (7.615 + 7.071), rel=0.001)
    # A reference policy's parameters come, as the actor's do for its scores.
    third = changed(config, algorithm={"kl_coef": 0.1})
    more = planned(third, cluster=cluster)
    more_seconds = more.training.offload_seconds - plan.training.offload_seconds
    assert more_seconds == pytest.approx(2 * 7.615, rel=0.001)
    scored = planned(with_reward_model(config, "Qwen2.5-7B"), cluster=cluster)
    more_seconds = scored.training.offload_seconds - plan.training.offload_seconds
    assert more_seconds == pytest.approx(2 * 7.071, rel=0.001), "no output projection"
    resident = planned(with_parallel(config, offload=False), cluster=cluster)
    assert resident.training.offload_seconds == 0
    # Two stages: the actor's last has a norm more than its first, 3584; the critic's first is the
    # fullest, and has the embedding, 545e6, and half of 6.53e9.
    config = with_parallel(config, world_size=2, pipeline_model_parallel_size=2)
    plan = planned(config, cluster=cluster)
    assert plan.training.offload_seconds == pytest.approx(30 * 2 * (0.545 + 3.263), rel=0.001)


def test_tokens_per_second_both_ways():
    workload = workload_of(SMALL_BASE, mean_response_tokens=1000, prompt_tokens=200)
    plan = planned(with_parallel(SMALL_BASE, offload=True), workload)
    responses = plan.response_tokens_per_second * plan.step_seconds * 8
    assert responses == pytest.approx(256 * 1000, rel=1e-3)
    assert plan.total_tokens_per_second * plan.step_seconds * 8 - responses == pytest.approx(51200)


def test_the_recipe_fits():
    check_fits(load_config(RECIPE), known_shape("Qwen2.5-32B"), 80 * 10**9)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["parallel.virtual_pipeline_model_parallel_size=null",
             "parallel.pipeline_model_parallel_size=1"],
            "actor_update needs .* GB of 80.0 .gradients 65.5; parameters 32.8; .*; raise "
            "parallel.tensor_model_parallel_size=2, context_parallel_size=1 or "
            "pipeline_model_parallel_size=1, lower max_tokens_per_microbatch=24576, set "
            "model.lora.rank=32, or let vapo plan find a layout",
        ),
        (
            ["parallel.recompute=none", "parallel.pipeline_model_parallel_size=8",
             "parallel.max_tokens_per_microbatch=262144"],
            "activations .*set recompute=full for none, lower",
        ),
        (
            ["rollout.gpu_memory_utilization=0.15", "rollout.tensor_model_parallel_size=8"],
            "KV cache of .* tokens, less than one sequence of 22528 .*raise "
            "rollout.gpu_memory_utilization=0.15 or rollout.tensor_model_parallel_size=8",
        ),
        (
            ["rollout.kv_cache_bytes=80000000000"],
            "generation needs .*lower rollout.kv_cache_bytes=80000000000 or",
        ),
        (
            ["parallel.offload=false", "rollout.gpu_memory_utilization=0.9"],
            "set offload=true",
        ),
    ],
)  # fmt: skip
def test_what_cannot_fit_is_refused_in_one_line(overrides, message):
    with pytest.raises(ConfigError, match=message) as error:
        check_fits(load_config(RECIPE, overrides), known_shape("Qwen2.5-32B"), 80 * 10**9)
    assert "\n" not in str(error.value)


def test_the_reserve_alone_refuses_nothing():
    shape, config = known_shape("Qwen2.5-32B"), load_config(RECIPE)
    phases = peak_memory(shape, config, 80 * 10**9)
    name, fullest = max(phases.items(), key=lambda item: item[1].total)
    between = fullest.total - fullest.reserve // 2
    config = with_rollout(config, kv_cache_bytes=fullest.kv_cache)
    cluster = Cluster(num_gpus=128, gpu_bytes=between)
    phases = peak_memory(shape, config, between)
    assert find_misfit(shape, config, cluster, phases).reason.startswith(name)
    check_fits(config, shape, between)


def test_yaml_to_paste_is_the_plan(ranking, tmp_path):
    config = next(
        plan.config
        for plan in ranking.plans
        if plan.config.parallel.virtual_pipeline_model_parallel_size
    )
    file = tmp_path / "plan.yaml"
    file.write_text(to_paste(config))
    loaded = load_config(file)
    assert loaded.parallel == config.parallel and loaded.rollout == config.rollout
    assert loaded.algorithm == config.algorithm


def test_a_dry_run_prints_the_plan_as_comments(capsys):
    options = [part for file in RECIPE for part in ("--config", file)] + ["--dry-run"]
    options += ["rollout.gpu_memory_utilization=0.5", "rollout.tensor_model_parallel_size=4"]
    # Trained with TP 8, a GPU of 40 GB is enough, and vLLM's half of it is not.
    options += ["parallel.tensor_model_parallel_size=8"]
    assert train.main([*options, "parallel.gpu_memory_gb=40"]) == 0
    text = capsys.readouterr().out
    assert VapoConfig.model_validate(yaml.safe_load(text)).parallel.gpu_memory_gb == 40
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert "# GPU: 40 GB" in text and any(line.startswith("# TP 8 x PP 4") for line in comments)
    assert "# DOES NOT FIT: generation leaves vLLM a KV cache of" in text


def test_a_dry_run_without_the_model_plans_the_published_one_of_its_name():
    """And the 32B recipe fits."""
    config = load_config(RECIPE)
    comment = dry_run_comment(config)
    assert comment.startswith("# models/Qwen2.5-32B: 32.76e9 parameters")
    assert "\n# fits\n" in comment and "DOES NOT" not in comment


def test_a_dry_run_assumes_episodes_where_there_is_an_environment():
    playing = ["environment.use=games:Chess", "environment.max_turns=3"]
    playing += ["reward.verifier=environment"]
    comment = dry_run_comment(load_config(RECIPE, playing))
    assert "\n# episodes: mean 3 turns, 512 tokens of observations; " in comment
    assert "\n# episodes" not in dry_run_comment(load_config(RECIPE))


def test_a_dry_run_without_a_model_says_so():
    config = load_config(RECIPE, ["model.hf_path=models/mine"])
    comment = dry_run_comment(config)
    assert comment.startswith("# no plan: model.hf_path=models/mine")
    assert comment.count("\n") == 1
    assert dry_run_comment(VapoConfig()).startswith("# no plan: model.hf_path is not")


def test_a_layout_that_does_not_divide_has_no_plan():
    config = load_config(RECIPE, ["parallel.tensor_model_parallel_size=16"])
    comment = dry_run_comment(config)
    assert comment.startswith("# no plan: ") and comment.count("\n") == 1
    assert "must divide the model's num_attention_heads=40" in comment


@pytest.mark.parametrize(("gigabytes", "refused"), [(1, True), (400, False)])
def test_a_run_asks_its_gpu(monkeypatch, tmp_path, capsys, gigabytes, refused):
    """The GPU's size is made up, and the run ends where it would build the trainer."""
    import torch

    class Gpu:
        total_memory = gigabytes * 10**9

    def stop(*_):
        raise ConfigError("the trainer was reached")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda rank: [Gpu][rank])
    trainer = types.SimpleNamespace(VapoTrainer=stop)
    monkeypatch.setitem(sys.modules, "vapo_megatron.training.loop", trainer)
    # A CUDA build of torch would look at each GPU.
    monkeypatch.setattr(libraries, "_cudnn", lambda: None)
    # There are neither weights nor data.
    monkeypatch.setattr(preflight, "check_inputs", lambda *_: Inputs(known_shape("Qwen2.5-7B")))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, {"WORLD_SIZE": "1"}.get(name, "0"))
    (tmp_path / "run.yaml").write_text("{}")
    assert train.main(["--config", str(tmp_path / "run.yaml")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    expected = "error: this configuration cannot fit into a GPU: " if refused else "was reached"
    assert expected in error


def test_every_plan_has_its_range(ranking):
    plan = ranking.plans[0]
    least, most = plan.step_seconds_range
    assert least / plan.step_seconds == pytest.approx(PUBLISHED_OVER_PREDICTED[0])
    assert most / plan.step_seconds == pytest.approx(PUBLISHED_OVER_PREDICTED[1])
    step = f"{plan.step_seconds:.0f}"
    row = describe_ranking(ranking, top=1).splitlines()[1].split()
    assert row[row.index(step) + 1] == f"{least:.0f}-{most:.0f}"
    assert f": {step} s a step ({least:.0f} to {most:.0f})\n" in describe_plan(SMALL_SHAPE, plan)
    assert "vLLM TP 8: 1817 s a step (1326 to 2616)\n" in dry_run_comment(load_config(RECIPE))


@pytest.mark.parametrize("slower", [1, 1e6])
def test_columns_never_run_into_each_other(ranking, slower):
    """However large a number is: two blanks before it."""
    cluster = dataclasses.replace(SMALL, peak_tflops=989 / slower, gpu_bytes=80 * 10**12)
    fixed = Fixed(tp=2, pp=2, vllm_tp=1, recompute="full", vpp=1, offload=True)
    slow = ranked(fixed, cluster)
    (plan,) = slow.plans
    head, line = describe_ranking(slow, top=1).splitlines()[:2]
    row = dict(zip(*(re.split(r"\s{2,}", x.strip()) for x in (head, line)), strict=True))
    assert line[: head.index("sample") + len("sample")].endswith(" " + row["sample"])
    assert row["step s"] == f"{plan.step_seconds:.0f}"
    assert row["sample"] == f"{plan.seconds['generation']:.1f}"
    assert row["critic"] == f"{plan.seconds['critic_update']:.1f}"
    assert row["peak GB"] == f"{plan.peak[1].total / 1e9:.1f}"
    lines = [line.strip() for line in describe_plan(SMALL_SHAPE, plan).splitlines()]
    phase = next(line for line in lines if line.startswith("generation "))
    sizes = dataclasses.astuple(plan.memory["generation"])
    shown = [float(cell) for cell in re.split(r"\s{2,}", phase)[1:]]
    assert sum(shown[:-1]) == pytest.approx(sum(sizes) / 1e9, rel=1e-2)
    seconds = [re.split(r"\s{2,}", line)[:2] for line in lines]
    assert ["generation", f"{plan.seconds['generation']:.1f}"] in seconds
