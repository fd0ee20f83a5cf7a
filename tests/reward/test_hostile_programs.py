"""Hundreds of hostile programs in the sandbox: none is right, outlives its limit or leaves a trace.

Not exercised: another kernel, another architecture (the numbers of aarch64's system calls).
"""

import contextlib
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.reward.hostile_programs import (
    ATTEMPTS,
    ENDLESS,
    HANG,
    MARK,
    PRETEND,
    RESPONSES,
    RIGHT,
    SEARCHES,
    SHAPES,
    columns,
    fenced,
    hostile_programs,
)
from vapo_megatron.reward.code_verifier import CodeVerifier
from vapo_megatron.reward.verifier import Problem
from vapo_megatron.sandbox import client
from vapo_megatron.sandbox.client import SandboxUnavailable

ANSWER = f"{MARK}7123456789"
LIMIT_SECONDS = 0.5


@pytest.fixture
def corpus(monkeypatch):
    """The programs, with all around them that they could find or destroy."""
    # What a program that is not confined would look for first.
    monkeypatch.setenv("VAPO_TEST_ANSWER", ANSWER)
    # Not below pytest's directory, which another user cannot enter.
    with tempfile.TemporaryDirectory(prefix="vapo_hostile_") as directory:
        place, data = Path(directory, "place"), Path(directory, "data.jsonl")
        data.write_text(f'{{"outputs": ["{ANSWER}"]}}\n')
        place.mkdir()
        victim = place / "victim"
        victim.write_text("kept")
        for path, mode in ((place, 0o777), (victim, 0o666), (place.parent, 0o755)):
            path.chmod(mode)
        before = victim.stat()
        yield hostile_programs(ANSWER, str(place), str(data))
        after = victim.stat()
        assert os.listdir(place) == ["victim"] and victim.read_text() == "kept"
        assert (after.st_mode, after.st_mtime, after.st_ino) == (
            before.st_mode, before.st_mtime, before.st_ino,
        )  # fmt: skip


def judged(corpus):
    """{(kind, shape): verdict}, after what must hold of any corpus."""
    verdicts = {}
    # On a machine that has other work, only what is endless may meet its limit.
    with sandboxed(LIMIT_SECONDS) as short, sandboxed(30.0) as long:
        for i, (kind, shape, response) in enumerate(corpus):
            verifier, template = short if kind in ENDLESS else long
            problem = Problem("", "", columns(shape, ANSWER))
            began = time.monotonic()
            (verdicts[kind, shape],) = verifier.score([response], [problem])
            assert time.monotonic() - began < 3 * LIMIT_SECONDS + 1 + 30, kind
            assert template.children(recursive=True) == [], kind
            if i % 20 == 0:
                right = fenced(RIGHT.format(answer=ANSWER))
                (verdict,) = long[0].score([right], [problem])
                assert verdict.is_correct, verdict
    orphans = [p for p in psutil.process_iter(["cmdline", "ppid"]) if p.info["ppid"] == 1]
    assert [p for p in orphans if "sandbox/template.py" in str(p.info["cmdline"])] == []
    right = [name for name, verdict in verdicts.items() if verdict.is_correct]
    assert right == []
    assert {verdict.status for verdict in verdicts.values()} <= {"wrong", "unparsable"}
    return verdicts


@contextlib.contextmanager
def sandboxed(seconds):
    """A verifier and its template, which no program ends, and which leaves no process."""
    verifier = CodeVerifier(seconds, 2 * seconds, memory_gb=0.5)
    template = psutil.Process(verifier._sandbox._process.pid)
    user = 61184 + template.pid % 4336
    try:
        yield verifier, template
        assert template.is_running()
        assert [p for p in psutil.process_iter(["uids"]) if p.info["uids"].real == user] == []
    finally:
        verifier._sandbox.close()


def test_a_sample_of_the_programs(corpus):
    """Some of each family, and one for each of the protections."""
    chosen = (
        "socket fork daemon many_threads memory_of_system data_file remove frames heap arenas "
        "environment start_of_the_stack exit_0 equal_to_all passed_in_each_file "
        "replies_in_each_file equal_hashes sleep_in_f signals_ignored"
    ).split()
    others = [item for item in corpus if item[0] not in ENDLESS.union(chosen)][:8]
    assert len(judged(others + [item for item in corpus if item[0] in chosen])) >= 40


def test_a_program_dies_with_the_template():
    verifier = CodeVerifier(60.0, 60.0)
    template = psutil.Process(verifier._sandbox._process.pid)
    own = os.getpgid(template.pid)
    asleep = Problem("", "", columns("script", ANSWER))
    response = fenced("import time\ntime.sleep(100)")
    with ThreadPoolExecutor(1) as thread:
        judging = thread.submit(verifier.score, [response], [asleep])
        try:
            deadline = time.monotonic() + 60
            while not (programs := template.children()):
                time.sleep(0.01)
            (program,) = programs
            while program.status() != psutil.STATUS_SLEEPING or os.getpgid(program.pid) == own:
                assert time.monotonic() < deadline, "it sleeps in a process group of its own"
                time.sleep(0.01)
        finally:
            template.kill()
        with pytest.raises(SandboxUnavailable, match="the sandbox's template has died"):
            judging.result(60)
    assert psutil.wait_procs([program], 30)[1] == []


def test_a_kernel_that_does_not_confine_is_refused(monkeypatch):
    monkeypatch.setattr(client, "_PROBE", "print('socket')\nprint('confined')")
    with pytest.raises(SandboxUnavailable, match="does not refuse what a program .*: socket"):
        CodeVerifier()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_programs(corpus):
    verdicts = judged(corpus)
    assert len(verdicts) == len(corpus) > 200
    # These end earlier: by another limit, or because what calls them finds no function, no file.
    others = {"endless_output", "endless_memory", "waiting_threads", "files_closed_and_asleep"}
    for (kind, _), verdict in verdicts.items():
        if kind in HANG.keys() - others:
            assert "more than" in verdict.note or "killed" in verdict.note, (kind, verdict)


def test_the_programs_are_many_and_different(tmp_path):
    corpus = hostile_programs(ANSWER, str(tmp_path), str(tmp_path / "data"))
    assert corpus == hostile_programs(ANSWER, str(tmp_path), str(tmp_path / "data"))
    assert len({(shape, response) for _, shape, response in corpus}) == len(corpus) > 200
    by_shape = [[kind for kind, shape, _ in corpus if shape == each] for each in SHAPES]
    assert min(map(len, by_shape)) > 70
    for kind, _, response in corpus:
        # Otherwise a search would prove nothing.
        assert (ANSWER in response) == (kind in ATTEMPTS or kind in RESPONSES), kind
    assert min(map(len, (ATTEMPTS, SEARCHES, PRETEND, HANG))) >= 10
