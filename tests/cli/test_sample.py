"""vapo sample: what is asked of the engine, and what is printed.

vLLM is a stand-in that answers 7; the environment is a real one. Not exercised: several processes.
"""

import contextlib
import io
import json
from array import array
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from tests.rollout.tiny_tokenizer import ANSWERS
from tests.weights.tiny_hf import write_tiny_model
from tests.whole_run import Engine, answered
from vapo_megatron.cli.main import main

VOCAB = 64


class LastEngine(Engine):
    """Answers 7 to the last prompt, and is cut off at the others."""

    def __init__(self, asked):
        super().__init__(0, 1)
        self.calls = asked

    def asked(self, requests, sampling, *_):
        samples = sum(request.rollout.first == 0 for request in requests)
        self.calls.append((samples, sampling.temperature, sampling.max_response_tokens))
        self.last = requests[-1].rollout.prompt

    def respond(self, rollout, seed):
        return answered(rollout, [3, VOCAB - 2], truncated=rollout.prompt != self.last)

    def shutdown(self):
        self.calls.append("shut down")


class TurnEngine(LastEngine):
    """Samples an episode's turns: two words and the end at first, then always one word."""

    def told(self, value):
        return value

    def run(self, work, sampling, *_):
        work.take(self.at_once)
        while work.waiting.number():
            for request in work.waiting.back(True):
                ids = array("i", [5] if request.rollout.turns else [3, 4, 2])
                zeros = array("f", [0.0] * len(ids))
                work.ended(request.rollout.extended(ids, zeros, 0, truncated=False))
            work.take(self.at_once)
        return []


def run(arguments, engine_class=LastEngine):
    """(exit code, what is printed on each stream, what the engine was asked); a worker's."""
    from vapo_megatron.cli.sampling import engine

    dist.destroy_process_group()
    asked, out, err = [], io.StringIO(), io.StringIO()
    with (
        mock.patch.object(engine, "build_engine", lambda *_: engine_class(asked)),
        contextlib.redirect_stdout(out), contextlib.redirect_stderr(err),
    ):  # fmt: skip
        code = main(["sample", *arguments])
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    return code, out.getvalue(), err.getvalue(), asked


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("sample")
    sizes = dict(num_layers=1, heads=1, kv_heads=1, hidden=32, vocab=VOCAB)
    write_tiny_model(tmp / "hf", last=ANSWERS, **sizes)
    rows = [{"prompt": f"w{i + 3}", "answer": str(i)} for i in range(3)]
    (tmp / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp


def test_problems_of_a_file(workers, place):
    given = ["--checkpoint", f"{place}/hf", "--data", f"{place}/rows.jsonl", "--problems", "2"]
    given += ["--samples", "2", "--temperature", "0.5", "rollout.max_response_tokens=9"]
    ((code, out, err, asked),) = workers.run(1, run, given)
    assert (code, err, asked) == (0, "", [(2, 0.5, 9), "shut down"])
    assert out.splitlines() == [
        "=== prompt (answer: 0)", "w3",
        "--- sample 1, 2 tokens, cut off", "w3Answer: 7",
        "--- sample 2, 2 tokens, cut off", "w3Answer: 7",
        "=== prompt (answer: 1)", "w4",
        "--- sample 1, 2 tokens, ended", "w3Answer: 7",
        "--- sample 2, 2 tokens, ended", "w3Answer: 7",
    ]  # fmt: skip


def test_a_prompt_is_a_users_message_where_there_is_a_template(workers, place):
    tokenizer = place / "hf/tokenizer_config.json"
    before = json.loads(tokenizer.read_text())
    template = "{% for m in messages %}w9 {{ m.content }} w8{% endfor %}"
    tokenizer.write_text(json.dumps({**before, "chat_template": template}))
    given = ["--checkpoint", f"{place}/hf", "--prompt", "w3 w4", "--samples", "1"]
    try:
        outs = [workers.run(1, run, [*given, *more])[0][:3] for more in ([], ["--plain"])]
    finally:
        tokenizer.write_text(json.dumps(before))
    answer = "--- sample 1, 2 tokens, ended\nw3Answer: 7\n"
    assert outs == [
        (0, f"=== prompt\nw9 w3 w4 w8\n{answer}", ""), (0, f"=== prompt\nw3 w4\n{answer}", "")
    ]  # fmt: skip


def played(workers, place, *more):
    """Lines that are printed of one episode, and what is printed as an error."""
    counting = Path(__file__).parents[1] / "e2e/counting.py"
    given = ["--checkpoint", f"{place}/hf", "--prompt", "w9", "--samples", "1"]
    given += [f"environment.use={counting}:Counting", "reward.verifier=environment", *more]
    given += ["rollout.max_prompt_tokens=99"]
    ((code, out, err, _),) = workers.run(1, run, given, TurnEngine)
    assert code == 0, err
    return out.splitlines()[2:], err


def test_an_episode_is_printed_turn_by_turn(workers, place):
    (sample, beginning, prompt, *turns), err = played(workers, place)
    assert sample == "--- sample 1, 5 tokens in 3 turns, ended, correct" and not err
    # Its seed chooses what the environment says first.
    assert beginning == "[beginning]" and prompt.startswith("w9w") and len(prompt) == 4
    assert turns == [
        "[action 1, reward 0.5]", "w3w4</s>", "[observation 1]", "w3w4",
        "[action 2, reward 0.25]", "w5", "[observation 2]", "w3",
        "[action 3, reward 0.5]", "w5",
    ]  # fmt: skip


def test_an_episode_says_what_cut_it(workers, place):
    (sample, _, _, *turns), _ = played(workers, place, "environment.max_turns=1")
    assert sample == "--- sample 1, 3 tokens in 1 turns, cut by environment.max_turns, wrong"
    assert turns == ["[action 1, reward 0.5]", "w3w4</s>"]


def test_an_episode_says_why_it_failed(workers, place):
    (sample, *_), err = played(workers, place, "environment.options={fails_at: 1}")
    assert sample.startswith("--- sample 1, 3 tokens in 1 turns, ended, failed (")
    assert "as asked" in sample and "as asked" in err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "give --prompt TEXT, or --data FILE"),
        (["--prompt", "a", "--data", "b"], "give --prompt TEXT, or --data FILE"),
        (["--prompt", ""], "give --prompt TEXT, or --data FILE"),
        (["--prompt", "a", "--samples", "0"], "--samples=0 must be at least 1"),
        (["--prompt", "a"], "--checkpoint=nowhere"),
    ],
)
def test_mistakes_in_the_options(given, message, capsys):
    assert main(["sample", "--checkpoint", "nowhere", *given]) == 2
    assert message in capsys.readouterr().err
