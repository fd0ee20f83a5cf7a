"""Training, exchange and weight sync give the same bits when collectives are as late as NCCL's.

late.py says how. Not exercised: streams, of which gloo has none; CUDA's caching allocator, which
may reuse memory that is still being sent; order of launch between groups.
"""

import contextlib

import pytest
import torch
import torch.distributed as dist

from tests.parallel import training
from tests.parallel.late import late_collectives
from tests.parallel.test_exchange import check, run_exchange
from tests.parallel.training import ALL, Layout
from tests.weights.reshard import live_sync
from tests.weights.tiny_hf import write_tiny_hf

HALVES = (ALL[:3], ALL[3:])
LAYOUTS = {
    "data parallel": Layout(
        dp=2, distributed=True, overlap=True, split=((HALVES[0],), (HALVES[1],))
    ),
    "sequence parallel": Layout(tp=2, sp=True, recompute="selective", split=(HALVES,)),
    "virtual pipeline": Layout(pp=2, vpp=2, split=(HALVES,)),
}
WAITED_LATER = {
    "data parallel": {"reduce_scatter_single_coalesced", "all_gather_single_coalesced"},
    "sequence parallel": {"reduce_scatter_single", "all_gather_single"},
    "virtual pipeline": {"send", "recv"},
}
"""What each layout does asynchronously."""


def lately(function, *arguments):
    """Return (result, what was started, how many receives were never waited for)."""
    with late_collectives() as late:
        result = function(*arguments)
    return result, dict(late.started), late.pending


def all_bits(results):
    """Everything that training.run_layout returns, as tensors."""
    found = []
    for result in results.values():
        found += [torch.tensor(result.losses), torch.tensor(result.grad_norms), result.outputs]
        found += [*result.gradients.values(), *result.weights.values()]
    return found


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    sizes = dict(hidden=32, heads=2, kv_heads=2, ffn=48, vocab=60)
    path = str(write_tiny_hf(tmp_path_factory.mktemp("hf"), **sizes))
    return {"actor": path, "critic": path}


@pytest.mark.parametrize("name", LAYOUTS)
def test_updates(workers, hf, name):
    layout = LAYOUTS[name]
    expected = workers.run(2, training.run_layout, hf, layout, 2)
    for on_time, (result, started, pending) in zip(
        expected, workers.run(2, lately, training.run_layout, hf, layout, 2), strict=True
    ):
        for a, b in zip(all_bits(on_time), all_bits(result), strict=True):
            assert torch.equal(a, b) and a.isfinite().all()
        assert WAITED_LATER[name] <= set(started), started
        assert pending == 0


def test_exchange(workers):
    found = workers.run(4, lately, run_exchange, 2, 2)
    assert all("all_to_all_single" in started for _, started, _ in found)
    check([result for result, *_ in found], 2)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return write_tiny_hf(tmp_path_factory.mktemp("small"), num_layers=1, tied=True)


def test_weight_sync(workers, small):
    """After updates whose parameters overlap_param_gather has not fetched yet."""
    expected = workers.run(2, live_sync.updates, small, False)
    found = workers.run(2, lately, live_sync.updates, small, True)
    assert [result for result, *_ in found] == expected
    assert all(pending == 0 for *_, pending in found)


def test_weight_sync_between_layouts(workers, tmp_path, small):
    expected = workers.run(2, live_sync.verified_versions, tmp_path, small)
    found = workers.run(2, lately, live_sync.verified_versions, tmp_path, small)
    assert [result for result, *_ in found] == expected
    assert all({"send", "recv"} <= set(started) for _, started, _ in found)


def unpacks_before_it_waits(tmp, path):
    """The weight sync with two lines exchanged."""
    from vapo_megatron.weights.reshard import transfer

    finish = transfer._finish

    def mistaken(posted, weights):
        received = finish(posted and posted._replace(works=[]), weights)
        for work in posted.works if posted else []:
            work.wait()
        return received

    transfer._finish = mistaken
    try:
        return live_sync.verified_versions(tmp, path)
    finally:
        transfer._finish = finish


def test_unpacking_before_the_wait_would_be_seen(workers, tmp_path, small):
    with pytest.raises(AssertionError, match="the engine's weights differ from the trainer's"):
        workers.run(2, lately, unpacks_before_it_waits, tmp_path, small)


def overwrites():
    """Change a buffer between send and wait, on rank 0."""
    buffer = torch.ones(3)
    if dist.get_rank():
        dist.irecv(buffer, 0).wait()
        return ""
    work = dist.isend(buffer, 1)
    buffer.add_(1)
    with contextlib.suppress(AssertionError):
        work.wait()
        return ""
    return "seen"


def test_a_buffer_that_is_reused_too_early_would_be_seen(workers):
    assert workers.run(2, lately, overwrites)[0][0] == "seen"
