"""OpenEnv's protocol against a stand-in server, which answers as the test says.

Not exercised: a server of the package itself (test_adapters.py), TLS.
"""

import json
import threading
import time

import pytest
from websockets.sync.server import serve

from vapo_megatron.environments.openenv_client import OpenEnv
from vapo_megatron.environments.step import Step
from vapo_megatron.reward.verifier import Problem

PROBLEM = Problem("Guess.", "7", {"level": 3})


def observation(reward=None, done=False, **fields):
    data = {"observation": {**fields, "metadata": {"x": 1}}, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


@pytest.fixture
def server():
    """A server with a list of replies -> (its URL, that list, what it was asked)."""
    replies, asked = [], []

    def answer(connection):
        asked.append(connection.request.path)
        for message in connection:
            asked.append(json.loads(message))
            if asked[-1]["type"] == "close":
                return
            reply = replies.pop(0)
            connection.send(json.dumps(reply))
            if reply["data"].get("code") == "CAPACITY_REACHED":
                return

    with serve(answer, "127.0.0.1", 0) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.socket.getsockname()[1]}", replies, asked
        running.shutdown()
        thread.join()


def test_an_episode(server):
    url, replies, asked = server
    replies += [
        observation(text="begin"), observation(0.5, text="on"),
        observation(True, True, text={"a": "\u00e9"}),
    ]  # fmt: skip
    environment = OpenEnv(
        f"{url}/", action="guess", observation="text", fields={"unit": "C"}, reset={"mode": "easy"},
        columns=["level"],
    )  # fmt: skip
    assert environment.reset(PROBLEM, 2**40) == "begin"
    assert environment.step("5") == Step("on", 0.5, False)
    assert environment.step("7") == Step('{"a": "\u00e9"}', True, True)
    environment.close()
    end = time.monotonic() + 60
    while len(asked) < 5 and time.monotonic() < end:
        time.sleep(0.01)  # Nobody answers the last message, so that it may still be on its way.
    assert asked == [
        "/ws",
        {"type": "reset", "data": {"seed": 2**40, "mode": "easy", "level": 3}},
        {"type": "step", "data": {"unit": "C", "guess": "5"}},
        {"type": "step", "data": {"unit": "C", "guess": "7"}},
        {"type": "close"},
    ]


def test_an_observation_without_a_field_is_json_without_its_metadata(server):
    url, replies, _ = server
    replies += [observation(text="begin", left=3), observation(text="on")]
    environment = OpenEnv(url, observation=None)
    assert json.loads(environment.reset(PROBLEM, 0)) == {"text": "begin", "left": 3}
    assert environment.step("x").reward == 0.0
    environment.close()


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (
            {"type": "error", "data": {"message": "Server full", "code": "CAPACITY_REACHED"}},
            r"the server refuses reset: Server full \(CAPACITY_REACHED\)",
        ),
        (
            {"type": "error", "data": {"message": "No", "code": "X", "errors": [{"loc": ["y"]}]}},
            r"refuses reset: No \(X\): \[{'loc': \['y'\]}\]",
        ),
        (observation(other=1), "has no field text; it has other, metadata"),
    ],
)
def test_a_refusal_is_raised(server, reply, message):
    url, replies, _ = server
    replies.append(reply)
    environment = OpenEnv(url, observation="text")
    with pytest.raises(RuntimeError, match=message):
        environment.reset(PROBLEM, 0)
    environment.close()


def test_no_server_and_no_url():
    environment = OpenEnv("http://127.0.0.1:9", connect_seconds=5.0)
    with pytest.raises(OSError):
        environment.reset(PROBLEM, 0)
    environment.close()
    with pytest.raises(ValueError, match="must begin with http://"):
        OpenEnv("localhost:8000")
