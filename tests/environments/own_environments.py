"""Environments as users write them, and what they must not write, for the tests beside this."""

import ctypes
import json
import os
import random
import resource
import signal
import struct
import sys
import threading
import time

import numpy

from tests.sandbox.handlers import leave_two
from vapo_megatron.environments import Step, playing
from vapo_megatron.reward.verifier import Verdict

MB = 10**6


class GuessTheNumber:
    """Says whether the number is higher; the problem's answer is the highest that it can be."""

    def __init__(self, lowest=1):
        self.lowest, self.guesses = lowest, 0

    def reset(self, problem, seed):
        """Draw the number."""
        self.number = random.Random(seed).randint(self.lowest, int(problem.answer))
        return f"{problem.prompt} Guess!"

    def step(self, action):
        """Compare."""
        self.guesses += 1
        guess = int(action)
        if guess == self.number:
            note = f"after {self.guesses}"
            return Step(reward=1.0, done=True, verdict=Verdict("correct", note=note))
        hint = "lower" if guess > self.number else "higher"
        return Step([{"role": "user", "content": hint}], reward=-0.25)


def guessing(lowest):
    """Return an environment, as a function does."""
    return GuessTheNumber(lowest)


class Draws:
    """Says what the random numbers are that it did not seed."""

    def reset(self, problem, seed):
        return f"{random.random()} {numpy.random.rand()}"

    def step(self, action):
        return Step(done=True)


class Closes:
    """Notes in a file that it is closed."""

    def reset(self, problem, seed):
        self.file = problem.answer

    def step(self, action):
        if action == "raise":
            raise RuntimeError("no such action")
        return Step(done=action == "end")

    def close(self):
        with open(self.file, "a") as file:
            file.write("closed\n")


class NeverBuilt(GuessTheNumber):
    """Cannot be built."""

    def __init__(self):
        raise RuntimeError("no board")


class NoReset:
    """Has one method of two."""

    def step(self, action):
        return Step()


class Explodes:
    """Cannot be unpickled."""

    def __reduce__(self):
        return explode, ()


def explode():
    raise RuntimeError("unpickled")


class BadRepr:
    """Shows nothing."""

    def __repr__(self):
        raise RuntimeError("no picture")


class BadText(str):
    """Text that does not like to be used."""

    def __str__(self):
        raise RuntimeError("no text")

    __getitem__ = encode = __len__ = __str__


def write_everywhere(data):
    """Write to whatever pipe of this process is open for that."""
    for number in range(3, 64):
        try:
            os.write(number, data)
        except OSError:
            pass


def message(reply):
    data = json.dumps(reply).encode()
    return struct.pack(">I", len(data)) + data


class Hostile:
    """Does what the action says, or on reset and close what the problem's answer says."""

    def reset(self, problem, seed):
        self.on_close = problem.answer
        if problem.answer.startswith("reset_"):
            return getattr(self, problem.answer.removeprefix("reset_"))()
        return None

    def step(self, action):
        return getattr(self, action)()

    def close(self):
        if self.on_close.startswith("close_"):
            getattr(self, self.on_close.removeprefix("close_"))()

    def well(self):
        return Step("well")

    # What never ends.

    def sleep(self):
        time.sleep(600)

    def loop(self):
        while True:
            pass

    def stop(self):
        os.kill(os.getpid(), signal.SIGSTOP)

    def catches_all(self):
        while True:
            try:
                time.sleep(600)
            except BaseException:
                pass

    def own_signals(self):
        for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        time.sleep(600)

    def bomb(self):
        for _ in range(3):
            os.fork()
            if os.getpid() != os.getpgrp() and random.random() < 0.5:
                os.setsid()
        time.sleep(600)
        os._exit(0)

    # What ends the process, or the call.

    def raises(self):
        raise RuntimeError("no such move")

    def raises_much(self):
        raise RuntimeError("\ud800 z" * 5 * MB)

    def leaves(self):
        sys.exit("good bye")

    def interrupts(self):
        raise KeyboardInterrupt

    def vanishes(self):
        os._exit(0)

    def kills_itself(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def kills_its_group(self):
        os.kill(0, signal.SIGKILL)

    def crashes(self):
        ctypes.string_at(0)

    def fills(self):
        return [bytearray(50 * MB) for _ in range(10**6)]

    def recurses(self):
        return self.recurses()

    def closes_files(self):
        os.closerange(0, 256)
        return Step("well")

    def opens_files(self):
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
        self.files = [open(os.devnull) for _ in range(100)]

    def reads(self):
        return Step(input())

    def vanishes_later(self):
        threading.Timer(0.0, os._exit, (0,)).start()
        return Step("well")

    # What writes where it should not.

    def replies_junk(self):
        write_everywhere(b"\x00\x00\x00\x03{1}")

    def replies_endlessly(self):
        write_everywhere(b"\xff\xff\xff\xff" + b"x" * 1000)

    def forges(self):
        write_everywhere(message({"result": {"observation": 5, "verdict": {"status": []}}}))

    def forges_an_error(self):
        write_everywhere(message({"error": {"a": 1}, "returned": "\n"}))

    def replaces_json(self):
        json.dumps = lambda *_: "a step"

    def replaces_the_check(self):
        playing.checked = lambda *_: Step(reward=float("nan"))

    # What comes back is not what it should be.

    def returns_none(self):
        return None

    def returns_bytes(self):
        return b"\xff" * 50 * MB

    def returns_text(self):
        return "well"

    def returns_five(self):
        return "", 0.0, True, False, {}

    def returns_bad_repr(self):
        return BadRepr()

    def returns_a_bomb(self):
        return Explodes()

    def observes_a_number(self):
        return Step(5)

    def observes_none(self):
        return Step(None)

    def observes_itself(self):
        message = {"role": "user"}
        message["content"] = message
        return Step([message])

    def observes_too_many(self):
        return Step([{"role": "user", "content": ""}] * 10**6)

    def observes_other_keys(self):
        return Step([{"role": "user", "content": "", "tool_calls": "[]"}])

    def rewards_text(self):
        return Step(reward="1")

    def rewards_nan(self):
        return Step(reward=float("nan"))

    def rewards_much(self):
        return Step(reward=10**400)

    def is_done_once(self):
        return Step(done=1)

    def notes_bytes(self):
        return Step(note=b"")

    def judges_in_words(self):
        return Step(verdict="good")

    def judges_by_score(self):
        return Step(verdict=0.5)

    def judges_falsely(self):
        verdict = Verdict("correct")
        object.__setattr__(verdict, "status", "best")
        return Step(verdict=verdict)

    # What does no harm.

    def prints(self):
        for _ in range(100):
            print("x" * MB, flush=True)
        return Step("well")

    def prints_a_header(self):
        os.write(1, b"\x00\x00\x00\x02{}")
        return Step("well")

    def has_threads(self):
        for _ in range(5):
            threading.Thread(target=time.sleep, args=(600,), daemon=False).start()
        return Step("well")

    def has_children(self):
        leave_two()
        return Step("well")

    def moves(self):
        os.chdir("/")
        return Step("well")

    def forgets_modules(self):
        sys.modules.clear()
        return Step("well")

    def forgets_variables(self):
        os.environ.clear()
        sys.path.clear()
        return Step("well")

    def says_much(self):
        return Step("y" * 50 * MB)

    def says_half(self):
        return Step("\ud800")

    def says_bad_text(self):
        return Step(BadText("well"))

    def counts_in_numpy(self):
        return Step("well", reward=numpy.float32(0.5), done=numpy.bool_(False))
