"""Rules that involve several configuration fields; schema.py has the rules of single fields.

Each returns an error message with field, value, rule and remedy, or None.
"""

from __future__ import annotations

from vapo_megatron.config.data import FileConfig, files_mistake, sources_mistake
from vapo_megatron.config.lora_rule import lora_rule
from vapo_megatron.config.reward import HYBRID, REWARD_MODEL, reward_mistakes, reward_range
from vapo_megatron.config.rollout_rules import (
    behaviour_rule,
    carry_over_rule,
    environment_rule,
    given_rule,
    placement_rule,
    replay_rule,
    shared_queue_rule,
)
from vapo_megatron.config.schema import VapoConfig
from vapo_megatron.config.vllm_args import kv_cache_rule, vllm_args_rule
from vapo_megatron.errors import ConfigError


def check_together(config: VapoConfig) -> None:
    """Check fields against each other.

    Raises:
        ConfigError: names the fields, their values, the rule and the remedy.
    """
    for check in _RULES:
        problem = check(config)
        if problem:
            raise ConfigError(problem)


def _divides(name: str, value: int, divisor_name: str, divisor: int) -> str | None:
    if value % divisor:
        return f"{name}={value} must be divisible by {divisor_name}={divisor}; change one of them"
    return None


def _layout_rule(c: VapoConfig) -> str | None:
    p = c.parallel
    tp, pp = p.tensor_model_parallel_size, p.pipeline_model_parallel_size
    cp = p.context_parallel_size
    if p.world_size % (tp * cp * pp):
        return (
            f"parallel.world_size={p.world_size} must be divisible by "
            f"tensor_model_parallel_size({tp}) * context_parallel_size({cp}) * "
            f"pipeline_model_parallel_size({pp}) = {tp * cp * pp}; change one of them"
        )
    ranks = p.world_size // pp
    if ranks % p.expert_model_parallel_size:
        return (
            f"parallel.expert_model_parallel_size={p.expert_model_parallel_size} must divide the "
            f"{ranks} ranks of a pipeline stage, world_size={p.world_size} / "
            f"pipeline_model_parallel_size={pp}; change one of them"
        )
    if p.sequence_parallel and tp == 1:
        return (
            "parallel.sequence_parallel=true needs parallel.tensor_model_parallel_size > 1, "
            "found 1; set sequence_parallel=false"
        )
    if p.overlap_param_gather and not (p.use_distributed_optimizer and p.overlap_grad_reduce):
        return (
            "parallel.overlap_param_gather=true needs use_distributed_optimizer=true and "
            "overlap_grad_reduce=true; set them, or overlap_param_gather=false"
        )
    return _divides(
        "rollout.num_processes" if c.rollout.is_disaggregated else "parallel.world_size",
        c.rollout.num_processes if c.rollout.is_disaggregated else p.world_size,
        "rollout.tensor_model_parallel_size", c.rollout.tensor_model_parallel_size,
    )  # fmt: skip


def _pipeline_rule(c: VapoConfig) -> str | None:
    p = c.parallel
    pp, vpp = p.pipeline_model_parallel_size, p.virtual_pipeline_model_parallel_size
    if vpp is None or vpp == 1:
        return None
    if pp == 1:
        return (
            f"parallel.virtual_pipeline_model_parallel_size={vpp} needs "
            "parallel.pipeline_model_parallel_size > 1, found 1; set it to null"
        )
    if p.batch_p2p_comm:
        # With two stages, the previous and the next stage are the same rank, and its two messages
        # get swapped. More stages deadlock when there are only as many microbatches as stages.
        return (
            "parallel.batch_p2p_comm=true must not be combined with "
            f"parallel.virtual_pipeline_model_parallel_size={vpp}: two stages would silently swap "
            "their messages, more stages could deadlock; set batch_p2p_comm=null, or "
            "virtual_pipeline_model_parallel_size=null"
        )
    return None


def _recompute_rule(c: VapoConfig) -> str | None:
    p = c.parallel
    if p.recompute != "full" and (p.recompute_method, p.recompute_num_layers) != ("uniform", 1):
        return (
            f"parallel.recompute_method={p.recompute_method} and recompute_num_layers="
            f"{p.recompute_num_layers} need parallel.recompute=full, found {p.recompute}; set it, "
            "or recompute_method=uniform and recompute_num_layers=1"
        )
    return None


def _batch_rule(c: VapoConfig) -> str | None:
    a = c.algorithm
    for part in ("group_size", "mini_batch_size"):
        name = "algorithm.responses_per_step"
        if problem := _divides(name, a.responses_per_step, part, getattr(a, part)):
            return problem
    size, dp_size = a.mini_batch_size, c.parallel.data_parallel_size
    if size < dp_size:
        return (
            f"algorithm.mini_batch_size={size} must be at least the data-parallel size {dp_size} "
            "(world_size / (TP * CP * PP)); raise it or lower parallel.world_size"
        )
    return None


def _lambda_rule(c: VapoConfig) -> str | None:
    for name in ("lambda_actor", "lambda_critic"):
        value = getattr(c.algorithm, name)
        if not isinstance(value, str) and not 0 <= value <= 1:
            word = "adaptive" if name == "lambda_actor" else "same_as_actor"
            return f"algorithm.{name}={value} must be a number in [0, 1] or {word}; change it"
    return None


def _needs_critic(c: VapoConfig, found: str, remedy: str) -> str:
    return (
        f"{found} needs a critic, which algorithm.advantage_estimator="
        f"{c.algorithm.advantage_estimator} does not train; set {remedy}, or "
        "advantage_estimator=gae"
    )


def _estimator_rule(c: VapoConfig) -> str | None:
    a = c.algorithm
    if "critic" in a.trained_roles:
        return None
    if a.value_pretraining_steps:
        return (
            f"algorithm.value_pretraining_steps={a.value_pretraining_steps} must be 0 with "
            f"algorithm.advantage_estimator={a.advantage_estimator}, which trains no critic; set "
            "algorithm.value_pretraining_steps=0, or advantage_estimator=gae"
        )
    if c.model.value_head_bias != "none":
        bias = c.model.value_head_bias
        return _needs_critic(c, f"model.value_head_bias={bias}", "value_head_bias=none")
    if a.positive_lm_weight == "advantage":
        return _needs_critic(c, "algorithm.positive_lm_weight=advantage", "positive_lm_weight=one")
    if a.group_size == 1 and a.advantage_estimator != "none":
        return (
            "algorithm.group_size=1 must be at least 2 with algorithm.advantage_estimator="
            f"{a.advantage_estimator}: advantages compare the responses of a group; raise it"
        )
    return None


def _stage_rule(c: VapoConfig) -> str | None:
    a = c.algorithm
    if c.model.critic_checkpoint is not None and "critic" not in a.trained_roles:
        path = c.model.critic_checkpoint
        return _needs_critic(c, f"model.critic_checkpoint={path}", "critic_checkpoint=null")
    if a.stage == "all":
        if a.value_pretraining_patience is None:
            return None
        return (
            f"algorithm.value_pretraining_patience={a.value_pretraining_patience} needs "
            "algorithm.stage=value_pretraining: with stage=all the number of steps is fixed; set "
            "it to null, or pretrain the critic in a run of its own and pass it as "
            "model.critic_checkpoint"
        )
    if a.advantage_estimator != "gae" or a.lambda_critic != 1:
        return (
            "algorithm.stage=value_pretraining regresses V on Monte-Carlo returns: it needs "
            "advantage_estimator=gae and lambda_critic=1, found "
            f"{a.advantage_estimator} and {a.lambda_critic}; set both"
        )
    if a.value_pretraining_steps <= (a.value_pretraining_patience or 0):
        return (
            f"algorithm.value_pretraining_steps={a.value_pretraining_steps} must exceed "
            f"value_pretraining_patience ({a.value_pretraining_patience or 0}) with "
            "stage=value_pretraining, which ends after that many steps; raise it"
        )
    return None


def _dynamic_sampling_rule(c: VapoConfig) -> str | None:
    a = c.algorithm
    if a.dynamic_sampling and a.group_size == 1:
        return (
            "algorithm.dynamic_sampling=true needs algorithm.group_size above 1, found 1: a "
            "group of one is never mixed and always dropped; raise group_size, or set "
            "dynamic_sampling=false"
        )
    return None


def _sampling_rule(c: VapoConfig) -> str | None:
    for name, off in (("top_p", 1), ("top_k", -1)):
        value = getattr(c.rollout, name)
        if value != off:
            return (
                f"rollout.{name}={value} must be {off}: training needs the log-probabilities of "
                f"the distribution that was sampled from; set it to {off} (evaluation.{name} is "
                "free)"
            )
    return None


def _reward_rule(c: VapoConfig) -> str | None:
    if c.reward.overlong_buffer_tokens > c.rollout.max_response_tokens:
        return (
            f"reward.overlong_buffer_tokens={c.reward.overlong_buffer_tokens} must not exceed "
            f"rollout.max_response_tokens={c.rollout.max_response_tokens}; lower it"
        )
    return None


def _verifier_rule(c: VapoConfig) -> str | None:
    for mistake in reward_mistakes(c.reward):
        return mistake
    files: dict[str, FileConfig] = {
        f"data.sources.{name}": file for name, file in c.data.sources.items()
    }
    files |= {f"evaluation.sources.{name}": file for name, file in c.evaluation.sources.items()}
    for field, file in files.items():
        if file.verifier not in (None, *c.reward.names):
            return (
                f"{field}.verifier={file.verifier} must be one of "
                f"{', '.join(sorted(c.reward.names))}; change it, or add it to reward.verifiers"
            )
        if file.verifier == HYBRID and not c.reward.hybrid:
            return (
                f"{field}.verifier=hybrid needs reward.hybrid, the verifiers that it chooses "
                "among; set it, such as to [code, math]"
            )
    return None


def _sources_rule(c: VapoConfig) -> str | None:
    held_out = c.evaluation
    return sources_mistake(c.data, c.algorithm.num_steps) or files_mistake(
        "evaluation", "path", held_out.path, held_out.sources
    )


def _reward_model_rule(c: VapoConfig) -> str | None:
    r, path = c.reward, c.model.reward_hf_path
    names = {"reward.verifier": r.verifier}
    names |= {f"reward.verifiers.{name}": name for name in r.verifiers}
    names |= {f"reward.hybrid's {name}": name for name in r.hybrid}
    for source, of_source in c.data.sources.items():
        names[f"data.sources.{source}.verifier"] = of_source.verifier or r.verifier
    for field, name in names.items():
        if r.use_of(name) == REWARD_MODEL and path is None:
            return (
                f"{field}, which is {REWARD_MODEL}, needs model.reward_hf_path, found null; set it "
                "to the reward model's directory, or use another verifier"
            )
    if path is not None and c.algorithm.dynamic_sampling:
        return (
            "algorithm.dynamic_sampling=true must not be combined with model.reward_hf_path="
            f"{path}: groups are dropped by their verdicts while vLLM samples, but the reward "
            "model scores later; set dynamic_sampling=false, or reward_hf_path=null"
        )
    return None


def _value_range_rule(c: VapoConfig) -> str | None:
    both, (lowest, highest) = c.algorithm.value_range, reward_range(c.reward)
    if both is None:
        return None
    if len(both) != 2 or both[0] >= both[1]:
        return (
            f"algorithm.value_range={both} must be [low, high] with low below high, such as "
            "[-1, 1]; change it, or set it to null"
        )
    if lowest < both[0] or both[1] < highest:
        return (
            f"algorithm.value_range={both} must contain the rewards, {lowest:g} to {highest:g}: "
            "otherwise no value could reach such a return; widen it, or set it to null"
        )
    return None


def _critic_prompt_rule(c: VapoConfig) -> str | None:
    if c.data.has_critic_prompts and "critic" not in c.algorithm.trained_roles:
        return _needs_critic(c, "data.critic_prompt_column", "it to null")
    if c.data.critic_prompt_column is not None and c.data.sources:
        return (
            f"data.critic_prompt_column={c.data.critic_prompt_column} is of data.train_path; with "
            "data.sources set it to null, and each source's critic_prompt_column"
        )
    return None


def _policy_loss_rule(c: VapoConfig) -> str | None:
    a, r = c.algorithm, c.rollout
    if a.policy_loss == "none" and a.positive_lm_coef == 0:
        return (
            "algorithm.policy_loss=none needs algorithm.positive_lm_coef above 0, found 0: there "
            "would be no loss; set positive_lm_coef=1, or policy_loss=ppo_clip"
        )
    if a.policy_loss == "none" and r.behaviour != "recomputed":
        return (
            f"rollout.behaviour={r.behaviour} must be recomputed with algorithm.policy_loss=none, "
            "which has no ratio; set it, or policy_loss=ppo_clip"
        )
    if a.policy_loss == "ppo_clip" or a.sampler_correction == "none":
        return None
    why = (
        "which has no ratio" if a.policy_loss == "none" else "whose ratio is to the engine already"
    )
    return (
        f"algorithm.sampler_correction={a.sampler_correction} must be none with "
        f"algorithm.policy_loss={a.policy_loss}, {why}; set it, or policy_loss=ppo_clip"
    )


def _no_advantages_rule(c: VapoConfig) -> str | None:
    a = c.algorithm
    if a.advantage_estimator != "none":
        return None
    if a.policy_loss != "none":
        return (
            "algorithm.advantage_estimator=none needs algorithm.policy_loss=none, found "
            f"{a.policy_loss}, which weighs tokens by their advantages; set policy_loss=none, or "
            "advantage_estimator=gae"
        )
    if a.advantage_whitening:
        return (
            "algorithm.advantage_whitening=true needs advantages, which "
            "algorithm.advantage_estimator=none does not compute; set advantage_whitening=false"
        )
    return None


def _timeouts_rule(c: VapoConfig) -> str | None:
    longest = max(dict(c.timeouts).items(), key=lambda field: field[1])
    if c.parallel.timeout_seconds < longest[1]:
        return (
            f"parallel.timeout_seconds={c.parallel.timeout_seconds:g} must be at least "
            f"timeouts.{longest[0]}={longest[1]:g}: ranks that finish a phase early wait for "
            "the others in a collective; raise it"
        )
    return None


def _precision_rule(c: VapoConfig) -> str | None:
    m = c.model
    if m.fp8 is not None and m.dtype != "bfloat16":
        return (
            f"model.fp8={m.fp8} needs model.dtype=bfloat16, found {m.dtype}; set "
            "model.dtype=bfloat16, or model.fp8=null"
        )
    if m.fp8 is not None and m.layer_spec == "local":
        return (
            f"model.fp8={m.fp8} needs Transformer Engine's layers, found model.layer_spec=local; "
            "set model.layer_spec=auto, or model.fp8=null"
        )
    if m.layer_spec == "transformer_engine" and m.dtype == "float32":
        return (
            "model.layer_spec=transformer_engine needs model.dtype=bfloat16, found float32: its "
            "fused attention does not support it; set model.dtype=bfloat16, or "
            "model.layer_spec=local"
        )
    return None


def _matrices_rule(c: VapoConfig) -> str | None:
    chosen = {f"{role}_method": c.optimizer.method(role) for role in ("actor", "critic")}
    found = [f"optimizer.{name}={method}" for name, method in chosen.items() if method != "adamw"]
    if found and c.model.fp8 is not None:
        return (
            f"model.fp8={c.model.fp8} must be null with {found[0]}, whose updates are of whole "
            "matrices in float32; set it to null, or the method to adamw"
        )
    return None


_RULES = (
    given_rule,
    _layout_rule, placement_rule, carry_over_rule, shared_queue_rule, _pipeline_rule, _batch_rule,
    _lambda_rule,
    _estimator_rule, _stage_rule, _sampling_rule, _reward_rule, _verifier_rule, _reward_model_rule,
    _value_range_rule, _timeouts_rule, _precision_rule, _dynamic_sampling_rule,
    _sources_rule, _policy_loss_rule, _no_advantages_rule, behaviour_rule, _critic_prompt_rule,
    replay_rule, lora_rule,
    _recompute_rule, _matrices_rule, vllm_args_rule, kv_cache_rule, environment_rule,
)  # fmt: skip
