"""Predicted bytes of host memory, of one process and of a node.

Counted: what offload keeps, what checkpoints need, and a step's responses, batch and microbatches
at their longest. Not counted: libraries and their workers (several GB a process), data sets,
evaluation (two rollout workers' batches at a time), and what models cache for a microbatch on a
CPU.
"""

from __future__ import annotations

from typing import NamedTuple

from vapo_megatron.config import VapoConfig
from vapo_megatron.data.columns import PER_TOKEN
from vapo_megatron.data.rollout import UNKNOWN_ROUTE
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.planning.matrices import kind_of
from vapo_megatron.planning.memory import offloads
from vapo_megatron.planning.model_bytes import (
    DTYPE_BYTES,
    Layout,
    all_base_bytes,
    engine_weight_bytes,
    optimizer_checkpoint_bytes,
    role_shape,
    state_bytes,
)
from vapo_megatron.planning.parameters import num_parameters
from vapo_megatron.weights.holders import layout_of

VLLM_HOST_TOKEN_BYTES = 260
"""Python lists and numbers of a response that is being sampled, per token and rank: token ids and
flat log-probabilities. 245 measured (tests/rollout/vllm/test_engine.py) of lists that have grown to
a sixteenth more than they hold, as they do on average; right after they grow it is an eighth."""

ROLLOUT_TOKEN_BYTES = 4 + 4 + 4
"""Of a finished response: int32 id, float32 log-probability, about four characters of text."""


class HostBytes(NamedTuple):
    """Host memory, of one process or of a node."""

    offloaded: int
    """Parameters and optimizer states of all roles; a base that they share once. Gradients are zero
    between updates and are dropped instead of offloaded."""
    checkpoint: int
    """While a checkpoint is saved or loaded."""
    step: int
    """A step's responses, if all prompts and responses have their longest length."""
    staged: int = 0
    """With rollout.lag: versions of the weights that a rollout worker holds."""

    @property
    def by_purpose(self) -> dict[str, int]:
        """The same by what it is needed for, in words."""
        purposes = ("what is offloaded", "a checkpoint", "a step's responses", "weights to come")
        return dict(zip(purposes, self, strict=True))

    @property
    def total(self) -> int:
        """All of it: a checkpoint is written while the next step goes on."""
        return sum(self)


def host_bytes(
    shape: ModelShape,
    config: VapoConfig,
    *,
    pp_rank: int,
    is_first_replica: bool,
    is_offloaded: bool,
    keeps_rollouts: bool,
) -> HostBytes:
    """Host memory of one process.

    With checkpoint.asynchronous the ranks of the first data-parallel replica copy all trained
    roles: their own parameters, and in float32 Adam's two moments and what the optimizer updates
    (see checkpoint_bytes). Before, the distributed optimizer's state is gathered, one role at a
    time, and megatron-core leaves it on every rank: get_parameter_state_dp_zero with
    return_on_all_ranks in distrib_optimizer.py.

    Args:
        shape: the model.
        config: the layout divides the model.
        pp_rank: the process's pipeline stage.
        is_first_replica: its data-parallel and context-parallel ranks are 0.
        is_offloaded: see `offloads`; a run knows whether it has a GPU.
        keeps_rollouts: see step_host_bytes.
    """
    algorithm = config.algorithm
    offloaded = 0
    if is_offloaded:
        states = [
            state_bytes(role_shape(shape, config, role), config, role, pp_rank=pp_rank)
            for role in config.roles
        ]
        offloaded = sum(s.parameters + s.optimizer for s in states)
        offloaded += all_base_bytes(shape, config, pp_rank=pp_rank)
    copied, gathered = 0, []
    for role in algorithm.trained_roles:
        every, trained = (
            num_parameters(shape, config, role, pp_rank=pp_rank, trained=only)
            for only in (False, True)
        )
        if is_first_replica:
            copied += every * DTYPE_BYTES[config.model.dtype]
        if kind_of(config, role) is not None:
            # Every replica copies what it owns.
            copied += state_bytes(shape, config, role, pp_rank=pp_rank).optimizer
            continue
        optimizer = trained * optimizer_checkpoint_bytes(config)
        copied += optimizer if is_first_replica else 0
        gathered.append(optimizer if config.parallel.use_distributed_optimizer else 0)
    if not config.checkpoint.asynchronous:
        copied = 0
    step = step_host_bytes(config, keeps_rollouts=keeps_rollouts)
    step += route_bytes(shape, config)
    if keeps_rollouts and config.samples and not config.rollout.is_disaggregated:
        step += returned_route_bytes(shape, config, _kept_responses(config))
    return HostBytes(offloaded, max([copied, *gathered]), step)


def step_host_bytes(config: VapoConfig, *, keeps_rollouts: bool) -> int:
    """Host memory of one process for a step whose prompts and responses are all the longest.

    First vLLM samples, on every rank of a replica; then the trainer has a batch. The first rank of
    the replica (keeps_rollouts) has the finished responses throughout, with dynamic sampling up to
    as many again of the latest round, and the groups that go on in the next step. Where others
    sample, a trainer has the batch alone. Where the data give the responses, nothing is sampled and
    every rank has its share of them.
    """
    parallel, rollout, count = config.parallel, config.rollout, config.algorithm.responses_per_step
    prompt, response = rollout.max_prompt_tokens, rollout.max_response_tokens
    trained = -(-count // parallel.data_parallel_size)
    batch = batch_bytes(config, trained * (prompt + response), trained * response)
    if config.rollout.is_disaggregated:
        return batch
    if not config.samples:
        return -(-count // parallel.world_size) * response * ROLLOUT_TOKEN_BYTES + batch
    sampled = -(-count // (parallel.world_size // rollout.tensor_model_parallel_size))
    finished = 0
    if keeps_rollouts:
        finished = _kept_responses(config) * response * ROLLOUT_TOKEN_BYTES
    running = min(sampled, rollout.max_num_sequences) * response * VLLM_HOST_TOKEN_BYTES
    return finished + max(running, batch)


def route_bytes(shape: ModelShape, config: VapoConfig) -> int:
    """Bytes of a process's routes of a step, with router replay: a byte for each chosen expert.

    Of its own tokens and its own stage's layers; of the stage that has most. The sampler's (r3)
    arrive for whole sequences, which are cut then.
    """
    parallel, rollout, experts = config.parallel, config.rollout, shape.experts
    if config.algorithm.router_replay == "off" or experts is None:
        return 0
    place = layout_of(shape, parallel)
    of_stages = [{n for chunk in stage for n in range(*chunk)} for stage in place.layers]
    layers = max(len(stage & {*experts.layers}) for stage in of_stages)
    responses = -(-config.algorithm.responses_per_step // parallel.data_parallel_size)
    tokens = responses * (rollout.max_prompt_tokens + rollout.max_response_tokens)
    own = tokens // (parallel.tensor_model_parallel_size * parallel.context_parallel_size)
    if config.algorithm.router_replay == "r3":
        own += tokens
    return own * layers * experts.per_token * (1 if experts.count <= UNKNOWN_ROUTE else 2)


def returned_route_bytes(shape: ModelShape, config: VapoConfig, responses: int) -> int:
    """Bytes of the routes that come with so many of the longest responses, of all layers."""
    rollout = config.rollout
    if config.algorithm.router_replay != "r3":
        return 0
    tokens = rollout.max_prompt_tokens + rollout.max_response_tokens
    return responses * tokens * shape.num_layers * shape.experts_per_token


def rollout_host_bytes(shape: ModelShape, config: VapoConfig, num_gpus: int) -> HostBytes:
    """Host memory of processes that only sample, of whole replicas.

    Each holds what it samples, and with a lag its shard of up to lag + 2 versions; the first of
    a replica also the responses of lag + 1 steps, until the next of them begins, and the groups
    that go on in the next step.
    """
    rollout, size = config.rollout, config.rollout.tensor_model_parallel_size
    replicas, of_all = -(-num_gpus // size), rollout.num_processes // size
    sampled = -(-config.algorithm.responses_per_step // of_all)
    running = min(sampled, rollout.max_num_sequences) * VLLM_HOST_TOKEN_BYTES
    held = (rollout.lag + 1) * sampled + _partial_responses(config, of_all)
    finished = held * ROLLOUT_TOKEN_BYTES
    step = (num_gpus * running + replicas * finished) * rollout.max_response_tokens
    step += replicas * returned_route_bytes(shape, config, held)
    versions = rollout.lag + 2 if rollout.lag else 0
    return HostBytes(0, 0, step, num_gpus * versions * engine_weight_bytes(shape, config))


def _kept_responses(config: VapoConfig) -> int:
    """Finished responses that the first rank of a replica has, where the trainers sample."""
    replicas = config.parallel.world_size // config.rollout.tensor_model_parallel_size
    sampled = -(-config.algorithm.responses_per_step // replicas)
    rounds = 2 if config.algorithm.dynamic_sampling else 1
    return rounds * sampled + _partial_responses(config, replicas)


def _partial_responses(config: VapoConfig, replicas: int) -> int:
    """Of one replica's groups that go on in the next step."""
    return -(-config.rollout.carry_over_groups // replicas) * config.algorithm.group_size


def batch_bytes(config: VapoConfig, tokens: int, response_tokens: int) -> int:
    """Bytes of a data-parallel rank's batch and its microbatches in an actor's update.

    Microbatches are views of the batch, apart from what indexes their tokens; there is one set for
    a whole step. See data/columns.py for the columns.

    Args:
        config: model, parallel, algorithm and data are used.
        tokens: S, prompts and responses.
        response_tokens: T.
    """
    cp_size = config.parallel.context_parallel_size
    per_token, index = 8 + 8 // cp_size, 8  # tokens, position_ids; predicting
    if config.parallel.sequence_parallel or cp_size > 1 or config.model.fp8:
        per_token += 8 // cp_size  # the microbatch's tokens are padded or cut, and so a copy
    if cp_size > 1:
        index = 16 // cp_size + 8  # predicting and targets of this rank's tokens; outputs
    held = sum(column.bytes for column in PER_TOKEN.values() if column.held(config.algorithm))
    per_response_token = index + 4 + held  # predicting; entropy
    found = per_token * tokens + per_response_token * response_tokens
    if config.data.has_critic_prompts:
        # The critic's own packing, and its prompts, which may be as long as the others.
        found += per_token * tokens + index * response_tokens + 8 * (tokens - response_tokens)
    return found


def host_bytes_per_node(shape: ModelShape, config: VapoConfig, *, gpus_per_node: int) -> HostBytes:
    """Host memory of the fullest node; where others sample, of the node that needs most."""
    trainers = config.parallel.world_size
    if not config.rollout.is_disaggregated:
        return _trainer_host_bytes(shape, config, min(gpus_per_node, trainers))
    rollout_workers, shared = config.rollout.num_processes, trainers % gpus_per_node
    found = []
    for training, sampling in (
        (min(gpus_per_node, trainers), 0),
        (0, min(gpus_per_node, rollout_workers)),
        (shared, min(rollout_workers, gpus_per_node - shared)),
    ):
        parts = HostBytes(0, 0, 0)
        if training:
            parts = _trainer_host_bytes(shape, config, training)
        if sampling:
            of_rollout_workers = rollout_host_bytes(shape, config, sampling)
            parts = HostBytes(*map(sum, zip(parts, of_rollout_workers, strict=True)))
        found.append(parts)
    return max(found, key=lambda parts: parts.total)


def _trainer_host_bytes(shape: ModelShape, config: VapoConfig, num_gpus: int) -> HostBytes:
    """Host memory of a node whose GPUs all belong to the fullest stage.

    As many of them as possible are of the first replica: ranks are numbered by tensor-parallel
    rank, then context-parallel and data-parallel rank, then stage.
    """
    layout = Layout(shape, config)
    first = min(num_gpus, layout.tp_size * -(-num_gpus // (layout.tp_size * layout.replica_size)))
    keeping, rest = (step_host_bytes(config, keeps_rollouts=keeps) for keeps in (True, False))
    replicas = -(-num_gpus // config.rollout.tensor_model_parallel_size)
    step = replicas * keeping + (num_gpus - replicas) * rest
    found = []
    for stage in layout.outer_stages:
        copying, other = (
            host_bytes(
                shape,
                config,
                pp_rank=stage,
                is_first_replica=copies,
                is_offloaded=offloads(config),
                keeps_rollouts=False,
            )
            for copies in (True, False)
        )
        found.append([first * a + (num_gpus - first) * b for a, b in zip(copying, other)])
    return HostBytes(*max(found, key=sum))._replace(step=step)
