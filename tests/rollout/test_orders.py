"""Orders of trainers to rollout workers: each takes all of them, in turn, and reports by itself.

Not exercised: a store between processes; tests/e2e/test_disaggregated.py has one.
"""

import torch.distributed as dist

from vapo_megatron.parallel.worlds import Worlds
from vapo_megatron.rollout.disaggregated.orders import Order, Orders


def test_orders_come_in_turn_and_reports_are_of_all_samplers():
    store = dist.HashStore()
    main, trainer, first, second = (Orders(store, Worlds(rank, 2, 2, None)) for rank in range(4))
    assert first.head() is None
    for each in (main, trainer):
        assert each.give("want", step=3, version=1) == 0
        assert each.give("take", step=3) == 1
    for sampler in (first, second):
        assert sampler.head() == sampler.wait() == Order(0, "want", {"step": 3, "version": 1})
        sampler.advance()
        assert sampler.wait() == Order(1, "take", {"step": 3})
        sampler.advance()
        assert sampler.head() is None
    first.report("sampled/3")
    assert not main.have_all("sampled/3")
    second.report("sampled/3")
    assert main.have_all("sampled/3") and not main.have_all("sampled/4")


def test_the_main_trainer_alone_gives_an_order_up():
    store = dist.HashStore()
    main, trainer, sampler = (Orders(store, Worlds(rank, 2, 1, None)) for rank in range(3))
    trainer.cancel(0)
    assert not sampler.is_cancelled(0)
    main.cancel(0)
    assert sampler.is_cancelled(0) and not sampler.is_cancelled(1)
