"""What vLLM is asked for a response that goes on. Real engines: test_turns.py, test_partial.py."""

from array import array
from types import SimpleNamespace

import numpy as np
import pytest
from vllm.outputs import CompletionOutput

from vapo_megatron.data.rollout import Prompt, Rollout
from vapo_megatron.rollout.requests import Request, SamplingSettings, continued_seed
from vapo_megatron.rollout.vllm.completions import request, routes_of

SAMPLING = SamplingSettings(1.0, 1.0, -1, 20, "rollout")
SEED = 11


def asked(num_tokens, inserted=(), most=None):
    rollout = Rollout(
        Prompt(0, "", (1, 2), ""), 0, 0, array("i", [5] * num_tokens),
        array("f", [0.0] * num_tokens), False, 0, inserted=inserted,
    )  # fmt: skip
    return request(SAMPLING, [2], Request(rollout, SEED, most))


def test_each_turn_has_random_numbers_of_its_own():
    """The same ones again would sample a turn after the same tokens as the turn before it."""
    seeds = [asked(n).seed for n in (0, 3, 6)]
    assert seeds == [SEED, continued_seed(SEED, 3), continued_seed(SEED, 6)]
    assert len(set(seeds)) == 3
    assert asked(3, inserted=((3, array("i", [7, 8])),)).seed == seeds[1]


@pytest.mark.parametrize(("most", "left"), [(None, 15), (4, 4), (18, 15)])
def test_inserted_tokens_count_towards_the_longest_response(most, left):
    assert asked(3, ((3, array("i", [7, 8])),), most).max_tokens == left


def completion(token_ids, routes):
    return CompletionOutput(0, "", token_ids, None, None, routed_experts=routes)


def test_routes_are_a_row_of_all_layers_for_each_token_that_was_read():
    routes = np.arange(5 * 3 * 2, dtype=np.uint8).reshape(5, 3, 2)
    found = routes_of(completion([7, 8], routes))
    assert found.shape == (5, 6) and found[1].tolist() == [6, 7, 8, 9, 10, 11]
    assert routes_of(completion([], None)) is None, "cut before its first token"
    for wrong in (None, routes.astype(np.uint16)):
        with pytest.raises(AssertionError, match="vLLM returned routes"):
            routes_of(completion([7, 8], wrong))


@pytest.mark.parametrize("is_first", [True, False])
def test_a_gpus_runner_is_left_alone(monkeypatch, is_first):
    """It calls the connector itself; on a replica's other ranks the scheduler asks for nothing."""
    from vapo_megatron.rollout.vllm import returned_routes

    platform = SimpleNamespace(is_cpu=lambda: False)
    monkeypatch.setattr(returned_routes, "current_platform", platform)
    group = SimpleNamespace(is_first_rank=is_first)
    monkeypatch.setattr(returned_routes, "get_tp_group", lambda: group)
    connector = SimpleNamespace(take_output=lambda request, output: "rows")
    found = SimpleNamespace(scheduler=SimpleNamespace(aux_output_connector=connector))
    engine = SimpleNamespace(engine_core=SimpleNamespace(engine_core=found))
    before = returned_routes.vllm.config.VllmConfig._verify_aux_output_compatibility
    returned_routes.allow_on_cpu()
    returned_routes.collect(SimpleNamespace(llm_engine=engine))
    assert connector.take_output("request", None) == ("rows" if is_first else None)
    assert returned_routes.vllm.config.VllmConfig._verify_aux_output_compatibility is before
