"""What fields were or are called elsewhere, for the message about an unknown one. Names only."""

from __future__ import annotations

import re

_PROMPTS = "which counts responses: prompts times algorithm.group_size"
_GROUPS = "grpo divides by the group's standard deviation, dr_grpo does not"
_MICRO = "in tokens: microbatches are packed"

REMOVED = {
    "rollout.carried_cache": (
        "recompute",
        "groups that go on are always recomputed with the new weights, which costs a step less "
        "than half a percent; remove it",
    ),
    "algorithm.value_bound": (
        None,
        "values are bounded by algorithm.value_range=[low, high]; set that in its place",
    ),
}
"""Fields that earlier versions had: the value that changes nothing, and what to do about others."""

PEERS: dict[str, dict[str, str]] = {
    "TRL": {
        "model_name_or_path": "model.hf_path",
        "dataset_name": "data.train_path",
        "reward_funcs": "reward.verifier",
        "reward_model_path": "model.reward_hf_path",
        "output_dir": "logging.run_dir",
        "report_to": "logging.wandb_project",
        "num_generations": "algorithm.group_size",
        "max_prompt_length": "rollout.max_prompt_tokens",
        "max_completion_length": "rollout.max_response_tokens",
        "response_length": "rollout.max_response_tokens",
        "generation_batch_size": "algorithm.responses_per_step",
        "steps_per_generation": "algorithm.responses_per_step / algorithm.mini_batch_size",
        "per_device_train_batch_size": "algorithm.mini_batch_size, of an update on all GPUs",
        "gradient_accumulation_steps": "algorithm.mini_batch_size, of an update on all GPUs",
        "num_mini_batches": "algorithm.responses_per_step / algorithm.mini_batch_size",
        "num_train_epochs": "algorithm.policy_steps, in steps",
        "max_steps": "algorithm.policy_steps",
        "beta": "algorithm.kl_coef",
        "epsilon": "algorithm.clip_low",
        "epsilon_high": "algorithm.clip_high",
        "cliprange": "algorithm.clip_low and algorithm.clip_high",
        "cliprange_value": "algorithm.value_clip",
        "lam": "algorithm.lambda_actor and algorithm.lambda_critic",
        "whiten_advantages": "algorithm.advantage_whitening",
        "loss_type": "algorithm.loss_aggregation",
        "scale_rewards": f"algorithm.advantage_estimator: {_GROUPS}",
        "mask_truncated_completions": "algorithm.overlong_filtering",
        "vllm_importance_sampling_correction": "algorithm.sampler_correction",
        "vllm_importance_sampling_cap": "algorithm.sampler_tis_cap",
        "learning_rate": "optimizer.actor_learning_rate and optimizer.critic_learning_rate",
        "warmup_steps": "optimizer.actor_warmup_updates and optimizer.critic_warmup_updates",
        "max_grad_norm": "optimizer.actor_clip_grad and optimizer.critic_clip_grad",
        "adam_epsilon": "optimizer.adam_eps",
        "bf16": "model.dtype",
        "gradient_checkpointing": "parallel.recompute",
        "use_peft": "model.lora.rank",
        "lora_r": "model.lora.rank",
        "lora_alpha": "model.lora.alpha",
        "lora_target_modules": "model.lora.targets",
        "vllm_mode": "rollout.placement",
        "vllm_gpu_memory_utilization": "rollout.gpu_memory_utilization",
        "vllm_tensor_parallel_size": "rollout.tensor_model_parallel_size",
        "save_steps": "checkpoint.every_steps",
        "save_total_limit": "checkpoint.keep_last",
        "resume_from_checkpoint": "checkpoint.resume",
        "eval_steps": "evaluation.every_steps",
        "num_generations_eval": "evaluation.samples",
    },
    "verl": {
        "data.train_files": "data.train_path",
        "data.val_files": "evaluation.path",
        "data.prompt_key": "data.prompt_column",
        "data.train_batch_size": f"algorithm.responses_per_step, {_PROMPTS}",
        "data.max_prompt_length": "rollout.max_prompt_tokens",
        "data.max_response_length": "rollout.max_response_tokens",
        "actor_rollout_ref.model.path": "model.hf_path",
        "actor_rollout_ref.model.enable_gradient_checkpointing": "parallel.recompute",
        "actor_rollout_ref.actor.ppo_mini_batch_size": f"algorithm.mini_batch_size, {_PROMPTS}",
        "actor_rollout_ref.actor.ppo_micro_batch_size": (
            f"parallel.max_tokens_per_microbatch, {_MICRO}"
        ),
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": (
            f"parallel.max_tokens_per_microbatch, {_MICRO}"
        ),
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "parallel.max_tokens_per_microbatch",
        "actor_rollout_ref.actor.clip_ratio": "algorithm.clip_low and algorithm.clip_high",
        "actor_rollout_ref.actor.clip_ratio_low": "algorithm.clip_low",
        "actor_rollout_ref.actor.clip_ratio_high": "algorithm.clip_high",
        "actor_rollout_ref.actor.loss_agg_mode": "algorithm.loss_aggregation",
        "actor_rollout_ref.actor.entropy_coeff": "algorithm.entropy_coef",
        "actor_rollout_ref.actor.kl_loss_coef": "algorithm.kl_coef",
        "actor_rollout_ref.actor.use_kl_loss": "algorithm.kl_coef",
        "actor_rollout_ref.actor.grad_clip": "optimizer.actor_clip_grad",
        "actor_rollout_ref.actor.optim.lr": "optimizer.actor_learning_rate",
        "actor_rollout_ref.actor.optim.lr_warmup_steps": "optimizer.actor_warmup_updates",
        "actor_rollout_ref.actor.optim.weight_decay": "optimizer.weight_decay",
        "actor_rollout_ref.actor.fsdp_config.param_offload": "parallel.offload",
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload": "parallel.offload",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "parallel.context_parallel_size",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": (
            "parallel.tensor_model_parallel_size"
        ),
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": (
            "parallel.pipeline_model_parallel_size"
        ),
        "actor_rollout_ref.actor.megatron.context_parallel_size": "parallel.context_parallel_size",
        "actor_rollout_ref.rollout.n": "algorithm.group_size",
        "actor_rollout_ref.rollout.temperature": "rollout.temperature",
        "actor_rollout_ref.rollout.top_p": "rollout.top_p",
        "actor_rollout_ref.rollout.top_k": "rollout.top_k",
        "actor_rollout_ref.rollout.dtype": "rollout.dtype",
        "actor_rollout_ref.rollout.enforce_eager": "rollout.enforce_eager",
        "actor_rollout_ref.rollout.gpu_memory_utilization": "rollout.gpu_memory_utilization",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": (
            "rollout.tensor_model_parallel_size"
        ),
        "actor_rollout_ref.rollout.max_num_seqs": "rollout.max_num_sequences",
        "actor_rollout_ref.rollout.val_kwargs.n": "evaluation.samples",
        "actor_rollout_ref.rollout.val_kwargs.temperature": "evaluation.temperature",
        "actor_rollout_ref.rollout.val_kwargs.top_p": "evaluation.top_p",
        "critic.model.path": "model.critic_hf_path",
        "critic.optim.lr": "optimizer.critic_learning_rate",
        "critic.optim.lr_warmup_steps": "optimizer.critic_warmup_updates",
        "critic.grad_clip": "optimizer.critic_clip_grad",
        "critic.cliprange_value": "algorithm.value_clip",
        "critic.ppo_mini_batch_size": f"algorithm.mini_batch_size, {_PROMPTS}",
        "critic.ppo_epochs": "algorithm.critic_updates_per_step",
        "reward_model.model.path": "model.reward_hf_path",
        "reward_model.reward_manager": "reward.verifier",
        "reward_model.overlong_buffer.len": "reward.overlong_buffer_tokens",
        "reward_model.overlong_buffer.penalty_factor": "reward.overlong_penalty",
        "custom_reward_function.path": "reward.verifier, FILE.py:NAME",
        "custom_reward_function.name": "reward.verifier, FILE.py:NAME",
        "algorithm.lam": "algorithm.lambda_actor and algorithm.lambda_critic",
        "algorithm.adv_estimator": "algorithm.advantage_estimator",
        "algorithm.norm_adv_by_std_in_grpo": f"algorithm.advantage_estimator: {_GROUPS}",
        "algorithm.kl_ctrl.kl_coef": "algorithm.kl_coef",
        "algorithm.filter_groups.enable": "algorithm.dynamic_sampling",
        "algorithm.filter_groups.max_num_gen_batches": "algorithm.dynamic_sampling_max_rounds",
        "trainer.total_epochs": "algorithm.policy_steps, in steps",
        "trainer.total_training_steps": "algorithm.policy_steps",
        "trainer.critic_warmup": "algorithm.value_pretraining_steps",
        "trainer.n_gpus_per_node": "parallel.world_size, of all nodes",
        "trainer.nnodes": "parallel.world_size, of all nodes",
        "trainer.project_name": "logging.wandb_project",
        "trainer.default_local_dir": "logging.run_dir",
        "trainer.save_freq": "checkpoint.every_steps",
        "trainer.test_freq": "evaluation.every_steps",
        "trainer.resume_mode": "checkpoint.resume",
        "trainer.max_actor_ckpt_to_keep": "checkpoint.keep_last",
    },
    "NeMo-RL": {
        "grpo.num_prompts_per_step": f"algorithm.responses_per_step, {_PROMPTS}",
        "grpo.num_generations_per_prompt": "algorithm.group_size",
        "grpo.max_num_steps": "algorithm.policy_steps",
        "grpo.max_num_epochs": "algorithm.policy_steps, in steps",
        "grpo.normalize_rewards": f"algorithm.advantage_estimator: {_GROUPS}",
        "grpo.overlong_filtering": "algorithm.overlong_filtering",
        "grpo.use_dynamic_sampling": "algorithm.dynamic_sampling",
        "grpo.val_period": "evaluation.every_steps",
        "grpo.seed": "seed",
        "grpo.async_grpo.enabled": "rollout.placement",
        "grpo.async_grpo.max_trajectory_age_steps": "rollout.lag",
        "loss_fn.reference_policy_kl_penalty": "algorithm.kl_coef",
        "loss_fn.ratio_clip_min": "algorithm.clip_low",
        "loss_fn.ratio_clip_max": "algorithm.clip_high",
        "loss_fn.token_level_loss": "algorithm.loss_aggregation",
        "loss_fn.use_importance_sampling_correction": "algorithm.sampler_correction",
        "checkpointing.checkpoint_dir": "logging.run_dir",
        "checkpointing.save_period": "checkpoint.every_steps",
        "checkpointing.keep_top_k": "checkpoint.keep_last",
        "policy.model_name": "model.hf_path",
        "policy.precision": "model.dtype",
        "policy.train_global_batch_size": "algorithm.mini_batch_size",
        "policy.train_micro_batch_size": f"parallel.max_tokens_per_microbatch, {_MICRO}",
        "policy.sequence_packing.train_mb_tokens": "parallel.max_tokens_per_microbatch",
        "policy.max_grad_norm": "optimizer.actor_clip_grad and optimizer.critic_clip_grad",
        "policy.max_total_sequence_length": (
            "rollout.max_prompt_tokens and rollout.max_response_tokens, apart"
        ),
        "policy.optimizer.kwargs.lr": "optimizer.actor_learning_rate",
        "policy.megatron_cfg.optimizer.lr": "optimizer.actor_learning_rate",
        "policy.megatron_cfg.activation_checkpointing": "parallel.recompute",
        "policy.megatron_cfg.tensor_model_parallel_size": "parallel.tensor_model_parallel_size",
        "policy.megatron_cfg.pipeline_model_parallel_size": "parallel.pipeline_model_parallel_size",
        "policy.megatron_cfg.context_parallel_size": "parallel.context_parallel_size",
        "policy.generation.max_new_tokens": "rollout.max_response_tokens",
        "policy.generation.temperature": "rollout.temperature",
        "policy.generation.stop_token_ids": "rollout.stop_token_ids",
        "policy.generation.vllm_cfg.tensor_parallel_size": "rollout.tensor_model_parallel_size",
        "policy.generation.vllm_cfg.gpu_memory_utilization": "rollout.gpu_memory_utilization",
        "policy.generation.vllm_cfg.enforce_eager": "rollout.enforce_eager",
        "policy.generation.colocated.enabled": "rollout.placement",
        "env.math.num_workers": "reward.num_workers",
        "logger.log_dir": "logging.run_dir",
        "logger.wandb.project": "logging.wandb_project",
        "logger.tensorboard_enabled": "logging.tensorboard",
        "cluster.gpus_per_node": "parallel.world_size, of all nodes",
        "cluster.num_nodes": "parallel.world_size, of all nodes",
    },
}
"""Trainer -> its name -> our field or fields, with what differs."""


_VAGUE = ("path", "name", "enable", "enabled", "len", "project")
"""Ends of names that say nothing without their section."""


def of_peers(path: str, least_parts: int = 1) -> str | None:
    """Return "TRAINER's NAME is FIELD here" for the name whose end agrees best; None: none does.

    Args:
        path: as it was written, with or without the sections before it.
        least_parts: how many parts must agree, unless the whole name does.
    """
    parts = path.lstrip("+").split(".")
    if parts[-1] in _VAGUE:
        least_parts = 2
    best, found = 0, None
    for trainer, names in PEERS.items():
        for name, field in names.items():
            own = name.split(".")
            same = 0
            while same < min(len(own), len(parts)) and own[-1 - same] == parts[-1 - same]:
                same += 1
            is_whole = same == len(own) == len(parts)
            # A whole name beats the same end of a longer one.
            score = 2 * same + is_whole
            if score > best and (same >= least_parts or is_whole):
                stop = len(re.split("[,:]", field, maxsplit=1)[0])
                best, found = score, f"{trainer}'s {name} is {field[:stop]} here{field[stop:]}"
    return found
