"""How much longer episodes take than responses of one turn. Slow: it asserts about time.

On a CPU, where each token costs, those that are read take about a quarter of those that are
sampled; among them are a turn's last ones, which do not fill a block of vLLM's. On a GPU both are
small beside decoding. Not exercised: GPUs, TP above 1.
"""

import pytest

from tests.rollout.vllm import turn_time_jobs as jobs
from tests.weights.tiny_hf import write_tiny_model

pytestmark = pytest.mark.slow

SIZE = {"num_layers": 4, "hidden": 256, "heads": 4, "kv_heads": 4, "ffn": 512, "vocab": 64}


@pytest.fixture(scope="module")
def found(vllm_workers, tmp_path_factory):
    path = write_tiny_model(tmp_path_factory.mktemp("model"), **SIZE)
    tmp = tmp_path_factory.mktemp("run")
    (found,) = vllm_workers.run(1, jobs.timed, tmp, path, 5, timeout_seconds=280)
    print({name: round(value, 3) for name, value in found.items()})
    return found


def test_turns_take_as_long_as_so_many_tokens(found):
    """Read or sampled."""
    assert found["as many tokens"] <= 1.05


def test_slow_calls_cost_their_own_episode(found):
    """One call in ten takes a second; decoding goes on meanwhile."""
    assert found["calls"] > 10 * found["chain"], "there are many in all"
    assert found["slow"] <= 1.15 * (found["instant"] + found["chain"])
