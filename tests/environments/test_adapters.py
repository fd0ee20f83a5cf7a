"""Environments of the packages gem-llm, skyrl-gym and openenv, by their adapters.

Slow: the packages (0.6, 48 and 24 MB, some seconds each) are downloaded once and kept in pytest's
cache directory; without a package index and without them the tests fail and say what they need.

Not exercised: tasks of these that download data, search or run programs of the policy's.
"""

import contextlib
import os
import random
import re
import socket
import subprocess
import sys
import time

import pytest

from tests.environments.packages import GEM, OPENENV, SKYRL_GYM, installed
from tests.environments.playing import answers, started
from vapo_megatron.environments.named import resolve
from vapo_megatron.reward.verifier import Problem

pytestmark = pytest.mark.slow


@pytest.fixture
def play(request, monkeypatch):
    """Make a Play of a built-in environment, with packages that its processes find."""
    with contextlib.ExitStack() as stack:

        def make(name, options, pins=()):
            if pins:
                monkeypatch.syspath_prepend(installed(request.config, name, pins))
            made = started(resolve(name), options, name=name, memory_bytes=10**9)
            return stack.enter_context(made)

        yield make


def begun(playing, problem, seed=0):
    """Begin the episode "a" -> what its reset says."""
    playing.end("a")
    playing.begin("a", problem, seed)
    played = answers(playing, "a")["a"]
    assert not played.failed, played.note
    return played.observation


def acted(playing, action):
    playing.act("a", action)
    played = answers(playing, "a")["a"]
    assert played.verdict is None
    return played


def test_a_game_of_gem(play):
    playing = play("gem", {"id": "game:GuessTheNumber-v0-easy"}, GEM)
    for seed in range(3):
        said = begun(playing, Problem(""), seed)
        assert said.startswith("You are playing Guess The Number.")
        assert said.endswith("Enter your next guess.") and "between 1 and 10" in said
        number = random.Random(seed).randint(1, 10)
        first = acted(playing, f"\\boxed{{{number % 10 + 1}}}")
        assert re.search("the target number is (lower|higher)", first.observation)
        assert not first.done and first.reward == 0.0
        last = acted(playing, f"\\boxed{{{number}}}")
        assert last.done and not last.failed and last.reward == 1.0
    begun(playing, Problem(""), 0)
    nothing = acted(playing, "I do not know")
    assert nothing.done and nothing.reward < 0


def test_a_board_of_gem_and_a_task_with_options(play):
    playing = play("gem", {"id": "game:TowerofHanoi-v0-easy", "options": {"num_disks": 2}}, GEM)
    assert "2 disks" in begun(playing, Problem(""))
    moves = [acted(playing, f"\\boxed{{{move}}}") for move in ("A B", "A C", "B C")]
    assert [played.done for played in moves] == [False, False, True]
    assert moves[-1].reward == 1.0


def test_gsm8k_of_skyrl_gym(play):
    playing = play("skyrl_gym", {"id": "gsm8k"}, SKYRL_GYM)
    for answer, reward in (("42", 1.0), ("41", 0.0)):
        assert begun(playing, Problem("6 * 7?", "42")) == []
        last = acted(playing, f"It is\n#### {answer}")
        assert (last.reward, last.done, last.observation, last.failed) == (reward, True, [], False)


def test_gsm8k_of_several_turns_of_skyrl_gym(play):
    options = {"id": "gsm8k_multi_turn", "extras": {"max_turns": 3}}
    playing = play("skyrl_gym", options, SKYRL_GYM)
    assert begun(playing, Problem("6 * 7?", "42")) == []
    first = acted(playing, "#### 41")
    (message,) = first.observation
    assert message["role"] == "user" and "#### ANSWER" in message["content"]
    assert first.reward == pytest.approx(0.2 / 3) and not first.done
    assert acted(playing, "Hm.").reward == 0.0
    last = acted(playing, "#### 42")
    assert last.done and last.reward == 1.0
    # A row's own columns win.
    begun(playing, Problem("6 * 7?", "", {"max_turns": 1, "reward_spec": {"ground_truth": "42"}}))
    assert acted(playing, "#### 42").reward == 1.0


@pytest.mark.parametrize(
    ("kind", "note"),
    [
        ("prompt", "ValueError: its init changes the prompt"),
        ("action", "ValueError: its step returns another action"),
    ],
)
def test_what_cannot_be_done_with_tokens_that_were_sampled(play, kind, note):
    own = f"{os.path.dirname(__file__)}/own_skyrl.py:Changes"
    playing = play("skyrl_gym", {"entry": own, "extras": {"kind": kind}}, SKYRL_GYM)
    playing.begin("a", Problem("Hello"), 0)
    played = answers(playing, "a")["a"]
    if kind == "action":
        assert played.observation == [{"role": "user", "content": "more"}]
        played = acted(playing, "hi")
    assert played.failed and played.note.startswith(note)


@pytest.fixture(scope="module")
def url(request):
    """A server of the package openenv, in a process of its own."""
    directory = installed(request.config, "openenv", OPENENV)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    script = f"{os.path.dirname(__file__)}/open_env_server.py"
    process = subprocess.Popen(
        [sys.executable, script, str(port)], env={**os.environ, "PYTHONPATH": str(directory)}
    )
    end = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        except OSError:
            assert process.poll() is None and time.monotonic() < end, "the server does not start"
            time.sleep(0.1)
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


def test_a_server_of_openenv(play, url):
    options = {
        "url": url, "action": "text", "observation": "text", "reset": {"highest": 20},
    }  # fmt: skip
    playing = play("openenv", options)
    for seed in range(3):
        assert begun(playing, Problem(""), seed) == "A number up to 20."
        number = random.Random(seed).randint(1, 20)
        first = acted(playing, str(number + 1))
        assert (first.observation, first.reward, first.done) == ("lower", -0.1, False)
        last = acted(playing, str(number))
        assert (last.observation, last.reward, last.done) == ("right", 1.0, True)


def test_many_episodes_of_one_server_and_one_too_many(play, url):
    playing = play("openenv", {"url": url, "action": "text", "columns": ["highest"]})
    keys = range(8)
    for key in keys:
        playing.begin(key, Problem("", "", {"highest": 1 + key}), key)
    said = {key: played.observation for key, played in answers(playing, *keys).items()}
    assert said == {key: f'{{"text": "A number up to {1 + key}."}}' for key in keys}
    playing.begin("more", Problem("", "", {"highest": 3}), 0)
    refused = answers(playing, "more")["more"]
    assert refused.failed and "CAPACITY_REACHED" in refused.note
    playing.act(0, "1")
    assert answers(playing, 0)[0].reward == 1.0


def test_what_the_server_refuses_ends_the_episode(play, url):
    playing = play("openenv", {"url": url, "action": "text"})
    begun(playing, Problem(""))
    failed = acted(playing, "seven")
    assert failed.failed and "the server refuses step: seven is no number" in failed.note
    playing = play("openenv", {"url": url, "action": "guess"})
    begun(playing, Problem(""))
    failed = acted(playing, "7")
    assert failed.failed and "VALIDATION_ERROR" in failed.note
