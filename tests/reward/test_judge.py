"""The judge and the pairwise judge against a server of our own, which answers by rules.

Not exercised: a language model (tests/e2e/test_judge_server.py).
"""

import json
import math
import os
import re
import threading
import time
from array import array
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from vapo_megatron.config import RewardConfig
from vapo_megatron.data.rollout import Prompt, Rollout
from vapo_megatron.errors import ConfigError
from vapo_megatron.reward.judge import Judge, Pairwise
from vapo_megatron.reward.scoring import LARGEST_BATCH, VerdictStream
from vapo_megatron.reward.verifier import Problem, Verdict
from vapo_megatron.reward.verifiers import Verifiers

SECRET = "sk-nobody-may-write-this-down"


class Server:
    """An OpenAI-compatible server whose answers are a function of the prompt.

    Args:
        answer: prompt -> text, or (text, {token: log-probability}), or a status code to fail with.
        port: 0 for a free one.
    """

    def __init__(self, answer, port=0):
        self.asked, self.keys, self.together, self.most = [], [], 0, 0
        self.lock = threading.Lock()
        self.has_gone = False
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    outer.asked.append(body)
                    outer.keys.append(self.headers["Authorization"])
                    outer.together += 1
                    outer.most = max(outer.most, outer.together)
                found = answer(body["prompt"] if "prompt" in body else _content(body))
                with outer.lock:
                    outer.together -= 1
                code, reply = (found, {}) if isinstance(found, int) else (200, _reply(body, found))
                data = json.dumps(reply).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
                # A server that has gone has no connections either.
                self.close_connection = outer.has_gone

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.http.daemon_threads = True
        self.port = self.http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def close(self):
        self.has_gone = True
        self.http.shutdown()
        self.http.server_close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def _content(body):
    (message,) = body["messages"]
    assert message["role"] == "user"
    return message["content"]


def _reply(body, found):
    text, tokens = found if isinstance(found, tuple) else (found, {})
    common = {"id": "1", "created": 0, "model": body["model"]}
    if "prompt" in body:
        logprobs = {"top_logprobs": [tokens], "tokens": [text]} if body.get("logprobs") else None
        choice = {"index": 0, "text": text, "finish_reason": "stop", "logprobs": logprobs}
        return {**common, "object": "text_completion", "choices": [choice]}
    listed = [{"token": t, "logprob": p, "bytes": None} for t, p in tokens.items()]
    content = [{"token": text, "logprob": 0.0, "bytes": None, "top_logprobs": listed}]
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    choice["logprobs"] = {"content": content} if body.get("logprobs") else None
    return {**common, "object": "chat.completion", "choices": [choice]}


def agrees(prompt):
    """The default template's judge: does the response end with the answer?"""
    answer = re.search(r"Correct answer: (.*)", prompt)[1]
    final = re.search(r"Final answer: (.*)\n\n\[", prompt, re.DOTALL)[1]
    return "YES" if final.strip().endswith(answer) else "NO"


def judged(verifier, responses, problems):
    try:
        return list(verifier.score(responses, problems))
    finally:
        verifier.close()


@pytest.mark.parametrize("chat", [True, False])
def test_a_judge_is_given_prompt_answer_and_final_answer_and_its_choice_is_the_verdict(chat):
    problems = [Problem("1 + 1 = {x}?", "2"), Problem("3 + 4?", "7")]
    with Server(agrees) as server:
        judge = Judge(base_url=server.url, model="small", chat=chat)
        found = judged(judge, ["it is 2", "it is 8"], problems)
    yes, no = "the judge said YES", "the judge said NO"
    assert found == [Verdict("correct", note=yes), Verdict("wrong", note=no)]
    for body in server.asked:
        assert body["structured_outputs"] == {"choice": ["YES", "NO"]}
        assert (body["model"], body["temperature"], body["max_tokens"]) == ("small", 0.0, 16)
    asked = [body["prompt"] if not chat else _content(body) for body in server.asked]
    assert any("] Problem: 1 + 1 = {x}?\n" in text for text in asked)


def test_choices_may_be_scores_and_the_last_one_counts_where_the_model_may_think():
    grades = {"0": 0.0, "5": 0.5, "10": 1.0}
    answers = {"a": "5 or 0? No: 10", "b": "so 0", "c": "none"}
    with Server(lambda prompt: answers[prompt[-1]]) as server:
        judge = Judge(
            base_url=server.url, model="m", choices=grades, constrained=False,
            template="grade {hint}: {response}", max_tokens=900, correct_from=0.6,
        )  # fmt: skip
        found = judged(judge, list("abc"), [Problem("", "", {"hint": "strictly"})] * 3)
    assert [(v.status, v.score) for v in found] == [
        ("correct", 1.0),
        ("wrong", 0.0),
        ("failed", None),
    ]
    assert found[2].note == "it answered 'none'"
    assert all("structured_outputs" not in body for body in server.asked)
    assert {body["messages"][0]["content"][:15] for body in server.asked} == {"grade strictly:"}


def test_as_many_are_asked_at_once_as_may_be_and_no_more():
    together = threading.Barrier(16)

    def slowly(prompt):
        try:
            together.wait(30)
        except threading.BrokenBarrierError:  # Fewer are asked at once.
            return "NO"
        time.sleep(0.3)  # A seventeenth would come meanwhile.
        return "YES"

    with Server(slowly) as server:
        judge = Judge(base_url=server.url, model="m", concurrency=16)
        found = judged(judge, ["x"] * 32, [Problem("p", "a")] * 32)
    assert [v.status for v in found] == ["correct"] * 32
    assert server.most == 16


def test_a_slow_answer_delays_no_other():
    """Fails by its time limit where a batch waits for its slowest answer before the next begins."""
    slow, done = threading.Event(), []

    def answer(prompt):
        if "Final answer: slow" in prompt:
            assert slow.wait(60)
        done.append(prompt)
        return agrees(prompt)

    texts = {i: f"slow {i}" if i == 0 else f"it is {i % 2}" for i in range(2 * LARGEST_BATCH)}
    prompt = Prompt(0, "p", (1,), "1")
    rollouts = [Rollout(prompt, 0, i, array("i", [i]), array("f", [0.0]), False, 0) for i in texts]
    with Server(answer) as server:
        options = {"base_url": server.url, "model": "m", "concurrency": 4}
        reward = RewardConfig(verifier="judge", verifiers={"judge": options})
        with (
            Verifiers(reward) as verifiers,
            VerdictStream(verifiers, lambda ids: [texts[i] for (i,) in ids]) as stream,
        ):
            for rollout in rollouts:
                stream.submit(rollout)
            deadline = time.monotonic() + 30
            while len(done) < len(texts) - 1 and time.monotonic() < deadline:
                time.sleep(0.01)
            others = len(done)
            slow.set()
            judged_all = stream.judged(rollouts)
    assert others == len(texts) - 1
    expected = ["correct" if i % 2 else "wrong" for i in texts]
    assert [judged.verdict.status for judged in judged_all] == expected
    assert [judged.text for judged in judged_all] == list(texts.values())


def test_answers_are_kept_by_content_and_failures_are_not(tmp_path):
    problems, cache = [Problem("p", "a")] * 3, str(tmp_path / "kept")
    fails = {"left": 1}

    def answer(prompt):
        if "Final answer: third" in prompt and fails["left"]:
            fails["left"] -= 1
            return 400
        return agrees(prompt) if "Final answer: " in prompt else "NO"

    with Server(answer) as server:
        for expected in (["correct", "wrong", "failed"], ["correct", "wrong", "wrong"]):
            judge = Judge(base_url=server.url, model="m", cache=cache)
            found = judged(judge, ["a", "second", "third"], problems)
            assert [v.status for v in found] == expected
        assert len(server.asked) == 4
        # Another template is another question.
        judge = Judge(base_url=server.url, model="m", cache=cache, template="{response} {answer}")
        judged(judge, ["a"], problems[:1])
        assert len(server.asked) == 5


def test_a_server_that_goes_away_is_asked_again():
    first = Server(lambda prompt: 503)
    port, judge = first.port, Judge(base_url=first.url, model="m", outage_seconds=120)
    found = []
    asking = threading.Thread(
        target=lambda: found.extend(judged(judge, ["a", "b"], [Problem("p", "a")] * 2))
    )
    asking.start()
    while not first.asked:
        time.sleep(0.01)
    first.close()
    time.sleep(1.0)  # Nobody listens.
    with Server(agrees, port):
        asking.join(60)
    assert [v.status for v in found] == ["correct", "wrong"]


def test_an_outage_that_lasts_is_a_failed_verdict_and_is_told_once(capfd):
    server = Server(lambda prompt: 503)
    judge = Judge(base_url=server.url, model="m", outage_seconds=1.0)
    found = judged(judge, ["a", "b"], [Problem("p", "a")] * 2)
    server.close()
    assert {v.status for v in found} == {"failed"} and "no answer for 1 s" in found[0].note
    assert capfd.readouterr().err.count("the judge gave no verdict") == 1


def test_a_server_that_stays_away_costs_its_limit_once():
    server = Server(lambda prompt: 503)
    judge = Judge(base_url=server.url, model="m", concurrency=2, outage_seconds=2.0)
    found = judged(judge, ["a"] * 12, [Problem("p", "a")] * 12)
    assert {v.status for v in found} == {"failed"}
    # The first two are tried for two seconds, the others once; else all are tried three times.
    assert len(server.asked) < 24
    server.close()


def test_the_key_is_sent_and_nowhere_else(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    with Server(lambda prompt: 401) as server:
        judge = Judge(
            base_url=server.url, model="m", key_variable="JUDGE_KEY",
            cache=str(tmp_path / "kept"),
        )  # fmt: skip
        (found,) = judged(judge, ["a"], [Problem("p", "a")])
    assert server.keys == [f"Bearer {SECRET}"] and found.status == "failed"
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    output = "".join(capfd.readouterr())
    assert SECRET not in output + found.note and SECRET.encode() not in written


def better(prompt):
    """A pairwise judge that likes long answers, and the first place a little."""
    a, b = (re.search(rf"Answer {x}: (.*)", prompt)[1] for x in "AB")
    logit = len(a) - len(b) + 0.5
    tokens = {
        "A": math.log(0.3 / (1 + math.exp(-logit))),
        " B": math.log(0.3 / (1 + math.exp(logit))),
    }
    return ("A" if logit > 0 else "B"), {"The": math.log(0.7), **tokens}


@pytest.mark.parametrize("chat", [True, False])
def test_the_probability_of_winning_in_both_orders_is_the_score(chat):
    problems = [Problem("p", "12", {"best": "1234"})] * 2
    with Server(better) as server:
        verifier = Pairwise(base_url=server.url, model="m", chat=chat, reference_column="best")
        found = judged(verifier, ["12345", "123"], problems)
    # Response first: one longer, s(1 + .5); reference first: the response wins with 1 - s(-1 + .5).
    sigmoid = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    expected = [(sigmoid(d + 0.5) + 1 - sigmoid(-d + 0.5)) / 2 for d in (1, -1)]
    assert [v.score for v in found] == pytest.approx(expected)
    assert [v.status for v in found] == ["correct", "wrong"]
    assert expected[0] == pytest.approx(1 - expected[1])  # The place does not count.
    assert len(server.asked) == 4 and {body["max_tokens"] for body in server.asked} == {1}


def test_a_pairwise_judge_that_names_neither_has_failed():
    with Server(lambda prompt: ("The", {"The": -0.1})) as server:
        verifier = Pairwise(base_url=server.url, model="m")
        (found,) = judged(verifier, ["x"], [Problem("p", "1")])
    assert found.status == "failed" and "neither A nor B" in found.note


def test_problems_that_lack_what_the_template_names_are_unusable():
    judge = Judge(base_url="http://127.0.0.1:9/v1", model="m",
                  template="{prompt} {rubric} {response}")  # fmt: skip
    pairwise = Pairwise(base_url="http://127.0.0.1:9/v1", model="m")
    problems = [Problem("p", "", {"rubric": "r"}), Problem("p", "a", {"rubric": None})]
    assert judge.unusable(problems) == {1: "has no rubric, which the judge's template names"}
    assert pairwise.unusable(problems) == {
        0: "has no ground truth, which responses are compared with"
    }
    judge.close()
    pairwise.close()


@pytest.mark.parametrize(
    ("use", "options", "message"),
    [
        ("judge", {}, "reward.verifiers.mine.base_url is required; set it"),
        ("judge", {"template": "no/file"}, "template=no/file cannot be read: No such file"),
        ("judge", {"template": "{prompt}"}, "the template has no {final} or {response}; add it"),
        ("judge", {"choices": {"YES": "good"}}, "choices.YES='good' must be a text with one of"),
        ("judge", {"api_key": SECRET}, "reward.verifiers.mine.api_key is no option of judge"),
        ("judge", {"base_url": "judge-node:8000"}, "base_url=judge-node:8000 must be an address"),
        ("judge", {"base_url": f"http://me:{SECRET}@x/v1"}, "the key in the environment variable"),
        (
            "judge",
            {"base_url": f"http://me:{SECRET}@x:port"},
            "the key in the environment variable",
        ),
        ("judge", {"base_url": "http://x:port/v1"}, "base_url=http://x:port/v1 must be an address"),
        ("judge", {"base_url": "http://[::1/v1"}, r"base_url=http://\[::1/v1 must be an address"),
        ("judge", {"concurrency": 0}, "concurrency=0 must be 1 or more; change it"),
        ("judge", {"timeout_seconds": 0}, "timeout_seconds=0 must be 0.001 or more; change it"),
        ("judge", {"outage_seconds": "600"}, "outage_seconds='600' must be 0 or more; change it"),
        ("judge", {"choices": {"YES": math.nan}}, "choices.YES=nan must be a text with one of"),
        ("judge", {"template": "{response} {}"}, "the field '' must be the name of a column"),
        ("judge", {"template": "{response} {a.b}"}, "the field 'a.b' must be the name of a column"),
        ("judge", {"template": "{response:d}"}, "the field 'response' must be the name of a col"),
        ("pairwise", {"labels": ["A", "A"]}, r"labels=\['A', 'A'\] must be two different texts"),
        ("pairwise", {"labels": ["A"]}, r"labels=\['A'\] must be two different texts"),
        ("pairwise", {"template": "{a} {response}"}, "the template has no {b}; add it"),
    ],
)
def test_a_wrong_option_is_named(use, options, message):
    where = {} if "base_url is required" in message else {"base_url": "http://x/v1", "model": "m"}
    reward = RewardConfig(verifier="mine", verifiers={"mine": {"use": use, **where, **options}})
    with Verifiers(reward) as verifiers, pytest.raises(ConfigError, match=message) as raised:
        verifiers.load()
    assert SECRET not in str(raised.value) and SECRET not in os.environ.values()
