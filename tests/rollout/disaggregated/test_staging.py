"""Versions of the weights in host memory: which are loaded, and that buffers are pinned and reused.

The weight sync into them is in tests/weights/reshard. Not exercised: CUDA, whose calls a stand-in
records.
"""

import contextlib

import pytest
import torch

from tests.parallel.test_offload_cuda import Cuda
from vapo_megatron.rollout.disaggregated.staging import Staging
from vapo_megatron.weights.reshard.plan import LiveWeight


class Engine:
    """Two weights of different types and odd sizes."""

    def __init__(self):
        self.live = {
            "a": LiveWeight(torch.zeros(3, 5, dtype=torch.bfloat16), 1),
            "b": LiveWeight(torch.zeros(7), 0),
        }
        self.policy_version = None

    def live_weights(self):
        return self.live

    @contextlib.contextmanager
    def weights_replaced(self, policy_version):
        yield
        self.policy_version = policy_version


def publish(staging, version):
    with staging.weights_replaced(version):
        for weight in staging.live_weights().values():
            weight.tensor.fill_(version)


def test_a_version_that_is_held_is_loaded():
    engine = Engine()
    staging = Staging(engine)
    assert staging.live_weights()["a"].padding_rows == 1
    for version in (1, 2, 3):
        publish(staging, version)
    for version in (2, 3):
        staging.load(version)
        assert engine.policy_version == version
        for weight in engine.live.values():
            assert (weight.tensor == version).all()
    staging.forget_before(3)
    with pytest.raises(KeyError):
        staging.load(2)


def test_versions_are_pinned_once_and_copied_without_waiting_for_each(monkeypatch):
    cuda = Cuda(monkeypatch)
    engine = Engine()
    staging = Staging(engine)
    for version in range(1, 6):
        publish(staging, version)
        staging.forget_before(version)
    # The inbox, the version that is held, and the next one before that is forgotten: 2 x 64 bytes.
    pinned = [call[2] for call in cuda.asked if call[0] == "pin"]
    assert pinned == [128] * 3
    cuda.asked.clear()
    staging.load(5)
    assert cuda.asked == ["copy non_blocking=True"] * 2 + ["synchronize"]
    assert (engine.live["b"].tensor == 5).all()
