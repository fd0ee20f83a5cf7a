"""Responses are judged while others are sampled: afterwards the last verdicts alone are waited for.
A step's prompts come from the sources that its weights name, on any number of ranks.

Data, tokenizer, and the way through a step and an evaluation are real. The sampler is a stand-in
that ends a response only once the one before has its verdict. Not exercised: vLLM, which tells of
each response as it ends (tests/rollout/vllm/test_engine.py).
"""

import contextlib
import threading
from unittest import mock

import torch.distributed as dist

from tests.dumped import NUM_RESPONSES, config
from tests.rollout.test_dynamic_sampling import KindsEngine, sampling
from tests.whole_run import RIGHT, Engine, answered, write_inputs, write_problems
from vapo_megatron.reward.verifier import Verdict
from vapo_megatron.rollout.source import StepRequest

HELD_OUT, SAMPLES = 3, 4
LIMIT_SECONDS = 20
"""For a verdict that takes no time; it does not come where judging begins after sampling."""


class Verifier:
    """Counts the responses that it has judged."""

    def __init__(self):
        self.judged, self.changed = 0, threading.Condition()

    def score(self, responses, problems):
        with self.changed:
            self.judged += len(responses)
            self.changed.notify()
        return [
            Verdict("correct" if r.endswith(f"Answer: {p.answer}") else "wrong", answer="7")
            for r, p in zip(responses, problems)
        ]

    def wait_for(self, count):
        with self.changed:
            assert self.changed.wait_for(lambda: self.judged >= count, LIMIT_SECONDS), (
                "no verdict while the other responses are sampled"
            )

    def same_answers(self, pairs):
        return [False for _ in pairs]

    def forget(self):
        pass

    def close(self):
        pass


class WaitingEngine(Engine):
    """Answers 7, and ends each response once those before it are judged."""

    def __init__(self, verifier, seed):
        super().__init__(seed=seed)
        self.verifier = verifier

    def asked(self, *_):
        self.before = self.verifier.judged

    def order(self, requests):
        return requests

    def respond(self, rollout, seed):
        self.verifier.wait_for(self.before + rollout.position)
        return answered(rollout, [3 + rollout.position, RIGHT])


def step_and_evaluation(settings):
    """(texts, judged when the reward phase begins and ends), an evaluation's; a worker's."""
    from vapo_megatron.rollout import sampling as module

    verifier, seen = Verifier(), {}

    @contextlib.contextmanager
    def phase(name):
        before = verifier.judged
        yield lambda *_, **__: None
        seen[name] = before, verifier.judged

    with mock.patch.object(module, "start_verifiers", lambda *_, **__: verifier):
        source, _ = sampling(settings, lambda seed: WaitingEngine(verifier, seed))
    with contextlib.closing(source):
        scored, _ = source.rollouts(StepRequest(0, 0, phase))
        metrics, _ = source.evaluate(0, phase)
    return [(s.text, s.status) for s in scored], seen["reward"], metrics


def test_verdicts_come_while_others_are_sampled(workers, tmp_path):
    hf, _ = write_inputs(tmp_path, train=4, test=HELD_OUT)
    settings = config(
        hf,
        data={"train_path": str(tmp_path / "train.jsonl")},
        evaluation={"path": str(tmp_path / "test.jsonl"), "samples": SAMPLES},
        logging={"run_dir": str(tmp_path / "run")},
    )
    ((judged, (before, after), metrics),) = workers.run(1, step_and_evaluation, settings)
    assert judged == [(f"w{3 + i}Answer: 7", "correct") for i in range(NUM_RESPONSES)]
    assert NUM_RESPONSES - 1 <= before <= after == NUM_RESPONSES
    assert metrics[f"evaluation/avg@{SAMPLES}"] == 1


def drawn_in_steps(settings, first, last, state):
    """(Of each step: position -> source and prompt, the data's state), of this rank; a worker's."""
    parallel = settings.parallel.model_copy(update={"world_size": dist.get_world_size()})
    settings = settings.model_copy(update={"parallel": parallel})
    kinds = "mw" * 50  # Half of the groups are mixed, so a step takes several rounds.
    source, _ = sampling(settings, lambda seed: KindsEngine(kinds, seed))
    phase = contextlib.contextmanager(lambda name: iter([lambda *_, **__: None]))
    found = []
    with contextlib.closing(source):
        if state is not None:
            source.load_state_dict(state)
        for step in range(first, last):
            scored, _ = source.rollouts(StepRequest(step, 0, phase))
            prompts = {s.rollout.position: s.rollout.prompt for s in scored}
            drawn = {i: (prompt.source, prompt.text) for i, prompt in prompts.items()}
            found.append((drawn, source.state_dict()))
    return found


def test_a_mixture_is_the_same_on_any_number_of_ranks_and_resumed(workers, tmp_path):
    """Two ranks in one go; one rank, resumed in the middle of a schedule from the two's state."""
    hf, _ = write_inputs(tmp_path, math=20)
    write_problems(tmp_path / "code.jsonl", range(27, 35))
    settings = config(
        hf,
        algorithm={"group_size": 2, "dynamic_sampling": True},
        data={
            "sources": {
                "math": {"path": f"{tmp_path}/math.jsonl", "schedule": [[0, 1], [3, 0]]},
                "code": {"path": f"{tmp_path}/code.jsonl", "schedule": [[0, 0], [3, 1]]},
            }
        },
        reward={"num_workers": 1},
        logging={"run_dir": str(tmp_path / "run")},
    )
    ranks = workers.run(2, drawn_in_steps, settings, 0, 4, None)
    assert [state for _, state in ranks[0]] == [state for _, state in ranks[1]]
    both = [{**one, **other} for (one, _), (other, _) in zip(*ranks)]
    assert all(sorted(drawn) == list(range(NUM_RESPONSES)) for drawn in both)
    shares = [sum(source == "code" for source, _ in drawn.values()) for drawn in both]
    assert shares[0] == 0 < shares[1] < shares[2] < shares[3] == NUM_RESPONSES, shares
    (resumed,) = workers.run(1, drawn_in_steps, settings, 2, 4, ranks[0][1][1])
    assert [drawn for drawn, _ in resumed] == both[2:]
    assert resumed[-1][1] == ranks[0][-1][1]
