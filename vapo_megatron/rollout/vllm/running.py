"""Runs a replica's requests token by token, and keeps its ranks in agreement.

Imported by engine.py alone, once vLLM may be imported.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import vllm.distributed.parallel_state as vllm_groups
from vllm import RequestOutput, SamplingParams
from vllm.inputs.engine import tokens_input

from vapo_megatron.errors import Stopped
from vapo_megatron.rollout.requests import TOKENS_BETWEEN_QUESTIONS, TOKENS_BETWEEN_TURNS
from vapo_megatron.rollout.vllm.completions import unfinished

T = TypeVar("T")

Asked = tuple[int, Sequence[int], SamplingParams]
"""Number, prompt and parameters."""


def complete(
    engine: Any,
    more: Callable[[int], Sequence[Asked]],
    keep: Callable[[int, Any], None],
    on_progress: Callable[[int, int], None] | None,
    has_time: Callable[[], bool] | None,
    is_enough: Callable[[], bool] = lambda: False,
    waiting: Callable[[], int] = lambda: 0,
    back: Callable[[bool], Sequence[Asked]] = lambda is_idle: [],
    *,
    at_once: int,
    expected: int,
    lora_request: Any = None,
) -> dict[int, Any]:
    """Run requests; give `keep` each completion as it ends.

    vLLM's own lists and objects, 200 bytes a token, are gone once `keep` returns.

    Args:
        engine: an LLMEngine.
        more: asked for requests at the start, and whenever some have ended: how many it has room
            for beyond those that run. All there are, or none if there will be no more.
        keep: takes number and completion.
        on_progress, has_time: see RolloutEngine.run; waiting, back: see requests.Waiting.
        is_enough: asked after every token; the same on all ranks of the replica.
        at_once, expected: responses that there is room for; number of requests, to show.
        lora_request: the adapter of all of them.

    Returns:
        What there is of those that are interrupted because it is enough, by number.

    Raises:
        Stopped: on all ranks of the replica: one of them has no time left.
    """
    running, begun, finished = set[str](), 0, 0
    alone = dist.get_world_size(vllm_groups.get_tp_group().cpu_group) == 1
    between_turns = 1 if alone else TOKENS_BETWEEN_TURNS

    def begin(asked: Sequence[Asked]) -> None:
        for number, ids, how in asked:
            running.add(str(number))
            engine.add_request(str(number), tokens_input([*ids]), how, lora_request=lora_request)

    try:
        begin(more(at_once))
        begun = len(running) + waiting()
        for token in itertools.count():
            is_idle = not engine.has_unfinished_requests()
            if (is_idle and not waiting()) or is_enough():
                break
            if has_time is not None and (is_idle or token % TOKENS_BETWEEN_QUESTIONS == 0):
                _stop_unless(has_time())
            outputs = [] if is_idle else engine.step()
            for output in outputs:
                assert isinstance(output, RequestOutput)
                running.remove(output.request_id)
                keep(int(output.request_id), output.outputs[0])
            if waiting() and (is_idle or token % between_turns == 0):
                begin(back(is_idle))
            left = len(running) + waiting()
            if left < begun - finished:
                finished = begun - left
                begin(more(at_once - left))
                begun = finished + len(running) + waiting()
                if on_progress is not None:
                    on_progress(finished, max(expected, begun))
        # Before abort_request, which drops their tokens.
        return {int(name): completion for name, completion in unfinished(engine).items()}
    finally:
        engine.abort_request(list(running))


def _stop_unless(has_time: bool) -> None:
    """Raise Stopped on all ranks of the replica together, so that their collectives match."""
    lacks_time = torch.tensor(not has_time, dtype=torch.int32)
    dist.all_reduce(lacks_time, dist.ReduceOp.MAX, group=vllm_groups.get_tp_group().cpu_group)
    if lacks_time:
        raise Stopped


def told(value: T) -> T:
    """Return what the replica's first rank has, on all its ranks."""
    group = vllm_groups.get_tp_group().cpu_group
    if dist.get_world_size(group) == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, group=group, group_src=0)
    return values[0]


def added(store: dist.Store, key: str, number: int) -> int:
    """Add to a number in the store, once for the replica; return the sum, on all its ranks."""
    group, total = vllm_groups.get_tp_group().cpu_group, torch.zeros(1, dtype=torch.int64)
    if dist.get_rank(group) == 0:
        total += store.add(key, number)
    dist.all_reduce(total, group=group)
    return int(total)
