"""Trainers and rollout workers of one launch: a world each, and the group that joins both.

Real gloo processes. Weights between the worlds are in tests/weights/reshard/test_sync.py, whole
runs in tests/e2e/test_disaggregated.py. Not exercised: NCCL.
"""

import torch
import torch.distributed as dist

from tests.dumped import NUM_RESPONSES, config, rollouts

TRAINERS, SAMPLERS = 2, 2


def apart():
    """Leave the tests' own group and start anew, the last ranks as rollout workers; a worker's."""
    from vapo_megatron.parallel import backend

    dist.destroy_process_group()
    return backend.initialize_distributed(60, SAMPLERS)


def worlds(path):
    """What each process makes out, and what reaches it from the other side."""
    from vapo_megatron.parallel import groups
    from vapo_megatron.parallel.exchange import exchange, gather_summary
    from vapo_megatron.parallel.reduce import any_rank, gather_objects, gather_objects_on

    worlds = apart()
    own = torch.ones(1)
    dist.all_reduce(own)
    found = {
        "side": (worlds.is_rollout_worker, dist.get_rank(), dist.get_world_size(), int(own)),
        "any": any_rank(worlds.rank == 3),
        "all": gather_objects(worlds.rank, worlds.group),
        "sent": gather_objects_on(1, {"text": "x" * 70_000 * worlds.rank}, worlds.group),
    }
    layout = {"parallel": {"world_size": TRAINERS, "tensor_model_parallel_size": 1}}
    ranks = None if worlds.is_rollout_worker else groups.initialize(config(path, **layout).parallel)
    # Each rollout worker holds half; the first trainer wants every third response, the second
    # the others.
    everything = rollouts()
    first = NUM_RESPONSES // 2 * (worlds.rank - TRAINERS)
    held = everything[first : first + NUM_RESPONSES // 2] if worlds.is_rollout_worker else []
    summary = gather_summary(held, NUM_RESPONSES, worlds.group)
    positions = range(NUM_RESPONSES)
    wanted = [[p for p in positions if p % 3 == 0], [p for p in positions if p % 3]]
    batch = exchange(held, summary, wanted, ranks, worlds.group)
    expected = [everything[p].rollout for p in ([] if ranks is None else wanted[ranks.dp_rank])]
    tokens = [t for r in expected for t in (*r.prompt.token_ids, *r.token_ids)]
    found["batch"] = (
        batch.positions.tolist() == [r.position for r in expected],
        batch.tokens.tolist() == tokens,
        batch.rollout_logprobs.tolist() == [x for r in expected for x in r.logprobs],
        set(summary.sources.tolist()),
        len(tokens) > 0,
    )
    dist.barrier(group=worlds.group)
    worlds.close()
    return found


def left_alone():
    """What torch says of a collective of both worlds when the last sampler is gone; a worker's."""
    worlds = apart()
    dist.barrier(group=worlds.group)
    if worlds.rank == TRAINERS + SAMPLERS - 1:
        worlds.close()
        return ""
    try:
        dist.barrier(group=worlds.group)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_failed_collective_says_what_failed_it(workers):
    *others, _ = workers.run(TRAINERS + SAMPLERS, left_alone)
    for said in others:
        assert said.startswith("RuntimeError: ") and "onnection" in said, said


def test_each_side_is_a_world_and_one_group_joins_them(workers, tmp_path):
    results = workers.run(TRAINERS + SAMPLERS, worlds, tmp_path)
    for rank, found in enumerate(results):
        is_rollout_worker = rank >= TRAINERS
        assert found["side"] == (is_rollout_worker, rank % 2, 2, 2)
        assert found["any"] is is_rollout_worker, (
            "a collective of one side does not reach the other"
        )
        assert found["all"] == [0, 1, 2, 3]
        texts = [{"text": "x" * 70_000 * source} for source in range(4)]
        assert found["sent"] == (texts if rank == 1 else [])
        assert found["batch"] == (True, True, True, {2, 3}, not is_rollout_worker)
