"""A run's episodes: started on all ranks or none, and ended with the work that they were for."""

from types import SimpleNamespace

import pytest
from transformers import PreTrainedTokenizerFast

from tests.rollout.chat_tokenizer import write_chat_tokenizer
from tests.workers import WorkerPool
from vapo_megatron.config import EnvironmentConfig, RewardConfig, RolloutConfig
from vapo_megatron.data.rollout import Prompt, Rollout
from vapo_megatron.errors import ConfigError, Stopped
from vapo_megatron.rollout.episodes import start_episodes, waiting_metrics
from vapo_megatron.rollout.inputs import Inputs
from vapo_megatron.rollout.requests import Request, Work

OWN = "tests.environments.own_environments"


def started(path, use, has_players=True):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    return start_episodes(
        EnvironmentConfig(use=use), RolloutConfig(), RewardConfig(verifier="environment"),
        Inputs(None, tokenizer, (2,)), has_players=has_players,
    )  # fmt: skip


def refused(path, rank):
    """What each of two ranks raises, the first of which has the environment."""
    try:
        started(path, f"{OWN}:NoReset", has_players=rank == 0)
    except ConfigError as error:
        return str(error)
    return None


@pytest.fixture
def path(tmp_path):
    return write_chat_tokenizer(tmp_path)


def jobs(path):
    import torch.distributed as dist

    return refused(path, dist.get_rank())


def test_an_environment_that_does_not_load_is_every_ranks_error(workers, path):
    found = workers.run(2, jobs, path)
    assert found[0] == found[1] and "has no method reset" in found[0]
    assert isinstance(workers, WorkerPool)


def stopped(path):
    """Begin an episode, then run out of time -> whether its process has ended, and seconds."""
    import time

    episodes = started(path, f"{OWN}:GuessTheNumber")
    prompt = Prompt(0, "A number.", (3, 4), "7")
    parts = iter([[Request(Rollout.empty(prompt, 0, 0, 0), 1)]])
    work = Work(lambda room: next(parts, []), lambda rollout: None, 1)
    engine = SimpleNamespace(told=lambda value: value, at_once=4)
    sessions = episodes._play._sessions
    try:
        with episodes.answering(work, engine, 64) as asked:
            asked.take(4)
            while not sessions.process_ids or len(sessions.process_ids) < 2:
                asked.waiting.back(True)
            raise Stopped
    except Stopped:
        pass
    end = time.monotonic() + 60
    while len(sessions.process_ids) > 1 and time.monotonic() < end:
        episodes._play.answers(0.1)
    left = len(sessions.process_ids)
    with episodes.answering(work, engine, 64) as asked:
        again = asked.waiting.number()
    seconds = episodes.take_idle_seconds()
    episodes.close()
    return left, again, seconds > 0, episodes.take_idle_seconds()


def test_what_is_unfinished_ends_with_its_work(workers, path):
    assert workers.run(1, stopped, path) == [(1, 0, True, 0.0)]


def test_the_longest_wait_counts():
    assert waiting_metrics([None, 0.5, 2.0]) == {"time/environment_waiting_seconds": 2.0}
    assert waiting_metrics([None]) == {}
