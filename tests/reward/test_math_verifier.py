"""Verdicts, and the processes behind them: real workers, really hung, stopped and killed.

Not exercised: the finding of the final answer (test_extraction.py), many workers on many cores.
"""

import contextlib
import functools
import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from math_verify import LatexExtractionConfig, parse, verify

from tests.alone import printed_by
from tests.reward import limits
from vapo_megatron.data.problems import Problem
from vapo_megatron.errors import DataError
from vapo_megatron.reward.math_verifier import MathVerifier, Verdict
from vapo_megatron.reward.mathematics.judge import judge
from vapo_megatron.sandbox import pool

ROOT = Path(__file__).parents[2]
POWER = "9^{9^{9^{9}}}"
ENDLESS = rf"\boxed{{{POWER}}}"


@pytest.fixture(scope="module")
def running():
    """running(num_workers, timeout_seconds) -> a verifier that tests share: workers load slowly."""
    with contextlib.ExitStack() as stack:
        make = functools.cache(lambda *limits: stack.enter_context(MathVerifier(*limits)))
        yield make


@pytest.fixture
def verifier(running):
    """One worker, which has judged nothing that it remembers."""
    running(1, 60.0).forget()
    return running(1, 60.0)


@pytest.fixture
def two(running):
    """Two workers."""
    running(2, 60.0).forget()
    return running(2, 60.0)


@pytest.fixture
def impatient(verifier, monkeypatch):
    """One worker, and a limit for what is endless alone."""
    limits.limit(monkeypatch, 0.5, POWER)
    return verifier


def statuses(verdicts):
    return [verdict.status for verdict in verdicts]


def wait_for_all(verifier):
    """Until every worker has loaded, and is idle."""
    while not all(worker.ready for worker in verifier._pool._workers):
        verifier._pool._wait()


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("5", "5"),
        ("05", "5"),
        ("5.0", "5"),
        ("1,234", "1234"),
        ("-7", r"-7"),
        ("0.5", r"\frac{1}{2}"),
        ("1/2", "0.5"),
        (r"\dfrac{2}{4}", r"$\frac12$"),
        ("0.333333", "1/3"),
        ("50%", "1/2"),
        (r"50\%", "50%"),
        ("50 percent", "0.5"),
        ("5 cm", "5"),
        ("5 dollars", "5"),
        (r"5\text{ cm}", "5"),
        (r"90^\circ", "90"),
        (r"\$5", "5"),
        ("x = 5", "5"),
        ("2 + 3", "5"),
        ("5e3", "5000"),
        (r"\sqrt{12}", r"2\sqrt{3}"),
        ("x^2 + 2x + 1", "(x+1)^2"),
        ("(1, 2)", "(1,2)"),
        ("2, 1", r"\{1, 2\}"),
        ("1, 2, 3", "1, 2, 3"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        ("Monday", r"\text{Monday}"),
        ("B", "B"),
        ("12", "She has 3 * 4 = 12.\n#### 12"),
    ],
)
def test_right_answers_are_correct(verifier, answer, gold):
    for response in (f"thus \\boxed{{{answer}}}", f"Answer: {answer}", f"#### {answer}"):
        assert statuses(verifier.score([response], [gold])) == ["correct"]


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("6", "5"),
        ("1, 2, 3", "2"),
        ("1, 2, 3", "3"),
        ("1, 2, 3", "1"),
        ("2, 3", "2"),
        ("2 or 3", "2"),
        ("2 and 3", "3"),
        ("2; 3", "2"),
        ("2 3", "2"),
        (r"2 \text{ or } 3", "2"),
        (r"\{1, 2, 3\}", "2"),
        (r"[1, 3]", "2"),
        (r"x = 2, x = 3", "2"),
        (r"\pm 2", "2"),
        (r"x \in \{1, 2, 3\}", "2"),
        (r"x \in \mathbb{R}", "2"),
        (r"\mathbb{R}", "2"),
        ("x", "2"),
        ("x > 1", "2"),
        (r"2 \neq 3", "2"),
        (r"2 \lor 3", "2"),
        ("2 | 3", "2"),
        (r"\frac{0}{0}", "2"),
        (r"\infty - \infty", "2"),
        ("$2$ and $3$", "2"),
        ("$2$ or $3$", "3"),
        (r"\begin{cases} 2 \\ 3 \end{cases}", "2"),
        (r"2 \\ 3", "2"),
        ("1,2,3", "123"),
        ("2 thousand", "2"),
        ("not 2", "2"),
        ("0.33", "1/3"),
        ("1/3", "0.33"),
        ("(2, 1)", "(1, 2)"),
        ("1, 2, 3, 4", "1, 2, 3"),
        ("x^2 + 2x", "(x+1)^2"),
        ("y + 1", "x + 1"),
        ("the answer that you are looking for", "2"),
        ("2 thirds", "2"),
        (r"3, \text{answer } \frac{1}{2}", "1/2"),
        (r"3 answer \frac{1}{2} ((", "1/2"),
        (r"3 \frac{1}{2} \ ", "1/2"),
        (r"3 \\((2\\)) \ ", "2"),
        (r"2 \text{ or so, maybe } 3 \text{ cm}", "2"),
        (r"2 \text{ x} + 10^{9}", "2"),
        (r"x = 2, x = 3", "3"),
        (r"3 \boxed 2", "2"),
        ("Tuesday", r"\text{Monday}"),
    ],
)
def test_wrong_answers_and_lists_of_guesses_are_not(verifier, answer, gold):
    responses = [f"thus \\boxed{{{answer}}}", f"Answer: {answer}", f"#### {answer}"]
    for verdict in verifier.score(responses, [gold] * 3):
        assert verdict.status in ("wrong", "unparsable")


def test_boxes_side_by_side_are_not_a_list_of_guesses(verifier):
    response = r"\boxed{1}, \boxed{2}, \boxed{3}"
    golds = ["1", "2", "3", "1, 2, 3"]
    assert statuses(verifier.score([response] * 4, golds)) == ["wrong"] * 3 + ["correct"]


def test_unparsable_means_no_answer_or_no_mathematics(verifier):
    responses = [
        "no idea",
        r"\boxed{",
        r"Answer: ((((",
        r"Answer: \frac{",
        "Answer: 1" + "+1" * 999,
    ]
    verdicts = verifier.score(responses, ["5"] * 5)
    assert statuses(verdicts) == ["unparsable"] * 5
    assert [v.answer for v in verdicts] == [None, None, "((((", r"\frac{", None]


def test_a_verdict_says_what_was_compared(verifier):
    (verdict,) = verifier.score(["I think. Answer: $x = 7$."], ["7"])
    assert verdict == Verdict("correct", answer="x = 7") and verdict.is_correct


@functools.cache
def parsed(formula):
    return parse(f"${formula}$", [LatexExtractionConfig()], "no_fallback", parsing_timeout=None)


@pytest.mark.parametrize("gold", ["5", "0.05", "1/3", r"\sqrt{8}", r"\{1, 2\}", "(1, 2)", "50%"])
def test_ordinary_equality_is_math_verifys(gold):
    """A box's formula, compared as math-verify compares it when it finds it in a text."""
    answers = ["5", "5.0", "5%", r"5\%", "5 percent", "0.050", "1/20", r"\frac{5}{100}", "0.333333"]
    answers += [
        "0.33",
        r"\frac13",
        r"\dfrac{1}{3}",
        r"2\sqrt{2}",
        r"2\sqrt 2",
        r"\sqrt8",
        "2.828427",
    ]
    answers += ["1, 2", "2, 1", "(2, 1)", r"(1,\, 2)", "[1, 2]", "1 + x", "x = 5", r"5\text{ m}^2"]
    answers += ["5 cm", r"5^\circ", "1/2", "50", ".5", "5 = 5", r"x \in \{1, 2\}", "((", "y"]
    expected = parsed(gold)
    for answer in answers:
        found = parsed(answer)
        equal = bool(found) and verify(expected, found, timeout_seconds=None)
        assert (judge(gold, answer) == "correct") == equal, answer


def test_order_is_kept_whatever_decides_an_item(two):
    # By turns: an integer, a fraction for a worker, and no answer; every third integer is right.
    responses, golds, expected = [], [], []
    for i in range(60):
        responses += [f"Answer: {i}", f"Answer: {i}/7", "nothing"]
        golds += [str(3 * (i // 3)), r"\frac{30}{7}", "1"]
        expected += ["correct" if i % 3 == 0 else "wrong", "correct" if i == 30 else "wrong"]
        expected += ["unparsable"]
    assert statuses(two.score(responses, golds)) == expected


def test_an_unparsable_ground_truth_is_named(verifier):
    golds = ["1", r"\frac{", "2", "", r"\frac{"]
    assert verifier.unparsable_answers(golds) == [1, 3, 4]
    with pytest.raises(DataError, match=r"response 1 has .*'\\\\frac\{'.* \(3 of 5 ground.* row"):
        verifier.score(["nothing"] * 5, golds)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ('["3","5"]', "5, 3"),
        ("['42']", "42"),
        ("{'answer': 42}", "42"),
        ('["\\\\boxed{3}", "x = 5"]', "3, 5"),
        ("[3, 5]", "[3, 5]"),
    ],
)
def test_a_ground_truth_may_be_the_text_of_a_list(verifier, gold, answer):
    (verdict,) = verifier.score([f"Answer: {answer}"], [gold])
    assert verdict.is_correct


def test_a_ground_truth_is_judged_correct_by_its_own_verifier(verifier):
    golds = {
        r"\sqrt{": "which the verifier cannot parse",
        r"5 \text{ apples}, 3 \text{ pears}": None,
        r"\frac{0}{0}": "which is judged wrong when a response gives it",
        "{'x': 1}": "which is a dict with the keys x",
        "nan": "which stands for a missing value",
        "x}": "which no response can give as its marked answer",
        "": "has no ground truth",
        "1/2": None,
        "12": None,
    }
    found = verifier.unusable([Problem("", gold) for gold in golds])
    for i, (gold, reason) in enumerate(golds.items()):
        assert reason in found[i] if reason else i not in found, gold


def test_one_answer_each_and_sensible_limits(verifier):
    with pytest.raises(ValueError, match="2 responses for 1 answers"):
        verifier.score(["Answer: 1", "Answer: 2"], ["1"])
    with pytest.raises(ValueError, match="num_workers=0"):
        MathVerifier(num_workers=0)
    assert verifier.score([], []) == []


def test_an_endless_answer_is_killed_and_delays_nobody(two, monkeypatch):
    two.score(["Answer: 1/2"], ["0.5"])
    wait_for_all(two)
    before, endless, ended = set(two.process_ids), [], []
    wait = two._pool._wait

    def send(worker, task, message, _):
        if POWER.encode() in message:
            # The same endless answer in every place of a group costs one limit.
            assert not endless
            endless.append(worker)
        limits.BEGIN(worker, task, message, 600.0)

    def until_all_others_are_judged():
        ended.extend(found := wait())
        if len(ended) == 8:  # The ground truth, and seven answers that are not its text.
            endless[0].deadline = 0.0
        return found

    monkeypatch.setattr(pool._Worker, "begin", send)
    monkeypatch.setattr(two._pool, "_wait", until_all_others_are_judged)
    responses = [ENDLESS] * 8 + [f"Answer: {i}/3" for i in range(8)]
    verdicts = two.score(responses, ["7/3"] * 16)
    assert statuses(verdicts) == ["timed_out"] * 8 + ["wrong"] * 7 + ["correct"]
    monkeypatch.setattr(two._pool, "_wait", wait)
    two.score(["Answer: 2/5"], ["7/3"])
    after = set(two.process_ids)
    assert len(after) == 2 and len(after & before) == 1  # one was replaced


def test_waiting_in_a_queue_is_no_part_of_the_limit(impatient):
    """One worker: everything behind the endless answer waits longer than the limit."""
    ordinary = [f"Answer: {i}/3" for i in range(6)]
    verdicts = impatient.score([ENDLESS, *ordinary], ["7"] * 7)
    assert statuses(verdicts) == ["timed_out"] + ["wrong"] * 6


def test_a_stopped_worker_is_replaced(verifier, monkeypatch):
    verifier.score(["Answer: 1/2"], ["0.5"])
    (stopped,) = verifier.process_ids
    os.kill(stopped, signal.SIGSTOP)
    limits.limit(monkeypatch, 0.5, "1/3")
    assert statuses(verifier.score(["Answer: 1/3"], ["0.5"])) == ["timed_out"]
    assert statuses(verifier.score(["Answer: 2/4"], ["0.5"])) == ["correct"]
    assert verifier.process_ids != [stopped]


def test_workers_killed_while_idle_are_replaced(two):
    two.score([f"Answer: {i}/2" for i in range(9)], ["0.5"] * 9)
    wait_for_all(two)
    killed = two.process_ids
    assert len(killed) == 2
    for process_id in killed:
        os.kill(process_id, signal.SIGKILL)
        os.waitid(os.P_PID, process_id, os.WEXITED | os.WNOWAIT)
    assert statuses(two.score(["Answer: 2/4"], ["0.5"])) == ["correct"]
    assert not set(killed) & set(two.process_ids)


def test_the_answer_of_a_killed_worker_is_judged_by_another(verifier):
    verifier.score(["Answer: 1/2"], ["0.5"])
    (victim,) = verifier.process_ids
    os.kill(victim, signal.SIGSTOP)  # so that it still holds its task when it dies
    killer = threading.Timer(0.5, os.kill, (victim, signal.SIGKILL))
    killer.start()
    verdicts = verifier.score([f"Answer: {i}/4" for i in range(4)], ["0.5"] * 4)
    killer.join()
    assert statuses(verdicts) == ["wrong", "wrong", "correct", "wrong"]
    assert victim not in verifier.process_ids


def test_an_answer_that_kills_its_worker_twice_is_given_up(verifier):
    verifier.score(["Answer: 1/2"], ["0.5"])
    finished, kills = threading.Event(), []

    def kill_whoever_takes_it():
        while not finished.is_set():
            for worker in list(verifier._pool._workers):
                if worker.ready and worker.task is not None:
                    kills.append(worker.process.pid)
                    os.kill(worker.process.pid, signal.SIGKILL)
            time.sleep(0.1)

    thread = threading.Thread(target=kill_whoever_takes_it)
    thread.start()
    try:
        verdicts = verifier.score([ENDLESS], ["5"])
    finally:
        finished.set()
        thread.join()
    assert statuses(verdicts) == ["timed_out"] and len(set(kills)) == 2


def _children_cpu_seconds(process_id):
    try:
        times = psutil.Process(process_id).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system


def test_memory_is_limited():
    limit = 40 << 20
    with MathVerifier(num_workers=1, timeout_seconds=60, memory_limit_bytes=limit) as verifier:
        verifier.score(["Answer: 1/2"], ["0.5"])
        (process_id,) = verifier.process_ids
        # 2^(10^12) has 125 GB: two workers fail at the limit, which says nothing of the answer.
        assert statuses(verifier.score([r"\boxed{\{2^{10^{12}}\}}"], [r"\{5\}"])) == ["timed_out"]
        assert statuses(verifier.score(["Answer: 2/4"], ["0.5"])) == ["correct"]
        assert verifier.process_ids != [process_id]
        (process_id,) = verifier.process_ids
        bound, largest = psutil.Process(process_id).rlimit(psutil.RLIMIT_AS)
        assert bound == largest and limit < bound < limit + (1 << 30)


def test_workers_load_neither_torch_nor_megatron(verifier):
    verifier.score(["Answer: 1/2"], ["0.5"])
    (process_id,) = verifier.process_ids
    assert "torch" not in Path(f"/proc/{process_id}/maps").read_text()
    # The very function that the worker calls, asked what it has loaded after judging.
    program = """
        import json, sys
        from vapo_megatron.reward.mathematics.judge import judge
        assert judge("x + x", "2x") == "correct"
        print(json.dumps(sorted(sys.modules)))
    """
    modules = json.loads(printed_by(program).splitlines()[-1])
    assert "math_verify" in modules
    assert not {m.split(".")[0] for m in modules} & {"torch", "megatron", "vllm", "numpy"}
    own = {name for name in modules if name.startswith("vapo_megatron.")}
    room = "vapo_megatron.reward.mathematics"
    assert own - {"vapo_megatron.reward"} == {n for n in own if n.startswith(room)} >= {room}


def test_off_the_main_thread_and_from_two_threads_at_once(two):
    results = {}

    def score(name, numerator):
        responses = [f"Answer: {i}/5" for i in range(20)]
        results[name] = statuses(two.score(responses, [f"{numerator}/5"] * 20))

    threads = [threading.Thread(target=score, args=(n, n)) for n in (3, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for numerator in (3, 8):
        expected = ["correct" if i == numerator else "wrong" for i in range(20)]
        assert results[numerator] == expected


def test_starting_is_lazy_and_integers_need_no_process():
    with MathVerifier(num_workers=2) as verifier:
        assert verifier.process_ids == []
        count = 5000
        started = time.process_time()
        verdicts = verifier.score([f"so\nAnswer: {i}" for i in range(count)], ["7"] * count)
        assert time.process_time() - started < count / 500
        assert [i for i, v in enumerate(verdicts) if v.is_correct] == [7]
        assert verifier.process_ids == []


@pytest.mark.slow
def test_five_hundred_simple_answers_a_second_on_two_cores():
    """In CPU seconds of the workers and their parent, which a loaded machine does not stretch."""
    kinds = (
        "Answer: {}/7",
        r"\boxed{{\frac{{{}}}{{9}}}}",
        "#### {}.25",
        r"\boxed{{{}\text{{ cm}}}}",
    )
    count = 4000
    responses = [kinds[i % 4].format(i) for i in range(count)]
    golds = [("3/7", r"\frac{4}{9}", "10.25", "11.0")[i % 4] for i in range(count)]
    right = [i for i, place in ((3, 0), (4, 1), (10, 2), (11, 3)) if i % 4 == place]
    with MathVerifier(num_workers=2, timeout_seconds=60) as verifier:
        verifier.score(["Answer: 1/2"], ["0.5"])
        wait_for_all(verifier)
        starts = [_children_cpu_seconds(process_id) for process_id in verifier.process_ids]
        own = time.process_time()
        verdicts = verifier.score(responses, golds)
        used = time.process_time() - own
        used += sum(map(_children_cpu_seconds, verifier.process_ids)) - sum(starts)
    assert [i for i, verdict in enumerate(verdicts) if verdict.is_correct] == right
    print(f"start {max(starts):.1f} s; {count / (used / 2):.0f} answers a second on two cores")
    assert max(starts) < 5
    assert count / (used / 2) >= 500


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_to_the_whole_job_does_not_end_its_workers(verifier, number):
    verifier.score(["Answer: 1/2"], ["0.5"])
    before = verifier.process_ids
    for process_id in before:
        os.kill(process_id, number)
    assert statuses(verifier.score(["Answer: 2/4"], ["0.5"])) == ["correct"]
    assert verifier.process_ids == before


def test_a_ground_truth_read_too_slowly_during_a_run_is_not_a_bad_one(verifier, monkeypatch):
    verifier.score(["Answer: 1/2"], ["0.5"])
    (stopped,) = verifier.process_ids
    os.kill(stopped, signal.SIGSTOP)
    limits.limit(monkeypatch, 0.5, "4/3")
    responses = ["Answer: 4/3", r"\boxed{2}"]
    assert statuses(verifier.score(responses, ["4/3", "2"])) == ["timed_out", "correct"]
    limits.limit(monkeypatch, 0.5, POWER)
    assert statuses(verifier.score(responses, ["4/3", "2"])) == ["correct"] * 2


def test_a_pair_is_judged_once_until_it_is_forgotten(impatient, monkeypatch):
    """One that timed out too: the other members of its group would wait as long."""
    asked, run = [], impatient._pool.run
    monkeypatch.setattr(
        impatient._pool, "run", lambda requests: asked.append(len(requests)) or run(requests)
    )
    responses, golds = ["Answer: 4/32", ENDLESS], ["0.125", "5"]
    for _ in range(2):
        assert statuses(impatient.score(responses, golds)) == ["correct", "timed_out"]
    impatient.forget()
    assert statuses(impatient.score(responses, golds)) == ["correct", "timed_out"]
    # Of each call the ground truths, then the pairs.
    assert asked == [1, 2, 0, 0, 0, 2]


def test_no_process_outlives_the_verifier():
    with MathVerifier(num_workers=2, timeout_seconds=60) as verifier:
        verifier.start()
        closed = verifier.process_ids
    verifier = MathVerifier(num_workers=1, timeout_seconds=60)
    verifier.start()
    forgotten = verifier.process_ids
    del verifier
    gc.collect()
    assert len(closed) == 2 and len(forgotten) == 1
    assert not any(_runs(process_id) for process_id in closed + forgotten)


def test_no_worker_outlives_a_killed_parent():
    program = (
        "import sys, threading, time\n"
        "from vapo_megatron.reward.math_verifier import MathVerifier\n"
        "v = MathVerifier(2, timeout_seconds=0.5)\n"
        "v._pool._timeout_seconds = 600\n"  # the parent waits; the worker's own limit is 0.5
        f"threading.Thread(target=v.score, args=([{ENDLESS!r}], ['5'])).start()\n"
        "while not any(w.task is not None and w.ready for w in v._pool._workers):\n"
        "    time.sleep(0.05)\n"
        "print(*v.process_ids, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        workers = [int(word) for word in parent.stdout.readline().split()]
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    assert len(workers) == 2
    deadline = time.monotonic() + 30
    while any(map(_runs, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(_runs, workers))


def _runs(process_id):
    try:
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_worker_without_its_libraries_says_so(tmp_path, monkeypatch):
    (tmp_path / "latex2sympy2_extended.py").write_text("raise ImportError('not of this machine')")
    monkeypatch.syspath_prepend(tmp_path)
    message = "did not start; is math-verify installed.*ImportError: not of this machine"
    with MathVerifier(num_workers=1) as verifier:
        with pytest.raises(RuntimeError, match=re.compile(message, re.DOTALL)):
            verifier.score(["Answer: 1/2"], ["1/3"])


def test_workers_that_cannot_start_are_reported(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with MathVerifier(num_workers=1) as verifier:
        with pytest.raises(RuntimeError, match="did not start: exit code 1, its error is above"):
            verifier.score(["Answer: 1/2"], ["0.5"])
