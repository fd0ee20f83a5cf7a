"""A run whose rows three verifiers judge: by hybrid's choice, each on its scale, told apart.

A whole run in one process, with mathematics, a class of one's own in place of a judge, and a reward
model; its rewards are compared, response by response, with what each verifier gives by hand. Then a
replay of what it dumped. vLLM and the way of the weights into it are stand-ins. Not exercised:
several ranks (tests/reward/test_hybrid.py, tests/test_reward_model_wiring.py), a judge's endpoint
(tests/reward/test_judge.py).
"""

from statistics import fmean

import pytest
import torch

from tests import jsonl
from tests.distributed.float64 import load_critic
from tests.dumped import MODEL, NUM_RESPONSES
from tests.rollout.tiny_tokenizer import ANSWERS, write_tiny_tokenizer
from tests.test_sampling_wiring import SAMPLES, stand_ins
from tests.weights.tiny_hf import write_tiny_hf, write_tiny_reward_model
from tests.whole_run import settings, trainer
from vapo_megatron.cli.train import main
from vapo_megatron.models import sampled

STRICT = "tests.reward.own_verifiers:Strict"
MEAN, STD, FROM = -0.3, 0.3, 0.05
REWARD = {
    "verifier": "hybrid", "hybrid": ["math", "judge", "taste"], "from_score": [-2.0, 2.0],
    "num_workers": 1, "timeout_seconds": 60.0,
    "verifiers": {"judge": {"use": STRICT, "ignore_case": True}, "taste": {"use": "reward_model"}},
    "scales": {
        "math": {"correct": 1.0, "incorrect": -1.0},
        "judge": {"low": 0.0, "high": 1.0, "correct_from": 0.5},
        "taste": {"mean": MEAN, "std": STD, "correct_from": FROM},
    },
}  # fmt: skip
ROWS = {
    "sums": [("w3", "7"), ("w4", "8")],
    # The first is no mathematics; the second names the one who judges it.
    "words": [("w5", "Answer"), ("w6", "7", {"verifier": "judge"})],
    "poems": [("w7", ""), ("w8", "")],
}
HELD_OUT = {"mixed": [("w9", "7"), ("w10", "Answer")], "numbers": [("w11", "8")]}
JUDGES = {"w3": "math", "w4": "math", "w5": "judge", "w6": "judge", "w7": "taste", "w8": "taste"}


def settings_of(tmp, name, policy_steps=2):
    return settings(
        tmp / "hf",
        tmp / name,
        model={"reward_hf_path": str(tmp / "reward")},
        algorithm={"policy_steps": policy_steps},
        rollout={"max_logprob_difference": None},
        data={
            "sources": {
                source: {
                    "path": str(tmp / f"{source}.jsonl"), "weight": 1 + (source == "sums"),
                    **({"answer_column": None} if source == "poems" else {}),
                }
                for source in ROWS
            }
        },
        evaluation={
            "sources": {name: {"path": str(tmp / f"{name}.jsonl")} for name in HELD_OUT},
            "samples": SAMPLES,
        },
        reward=REWARD,
        checkpoint={"hf_export": False},
        logging={"rollout_groups": 9, "dump_steps": policy_steps},
    )  # fmt: skip


def fit(tmp, name, replay):
    """Rows of the run, and of each step the groups for people; a worker's function."""
    noted = []
    with stand_ins(), trainer(settings_of(tmp, name), replay) as made:
        made.output.note = noted.append
        made.fit()
    files = sorted((tmp / name).glob("rollouts/*.jsonl"))
    return jsonl.read(tmp / name / "metrics.jsonl"), [jsonl.read(file) for file in files], noted


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("hybrid")
    for source, rows in ROWS.items():
        made = [{"prompt": p, "answer": a, **(more[0] if more else {})} for p, a, *more in rows]
        jsonl.write(tmp / f"{source}.jsonl", made)
    for name, rows in HELD_OUT.items():
        made = [{"prompt": p, "answer": a} for p, a in rows]
        jsonl.write(tmp / f"{name}.jsonl", made)
    for directory in (
        write_tiny_hf(tmp / "hf", **MODEL),
        write_tiny_reward_model(tmp / "reward", **{**MODEL, "num_layers": 3}, seed=5),
    ):
        write_tiny_tokenizer(directory, MODEL["vocab"], last=ANSWERS)
    return tmp


@pytest.fixture(scope="module")
def run(workers, place):
    """(rows, the groups of each step, what was printed)."""
    (done,) = workers.run(1, fit, place, "run", None)
    return done


def expected(group, response, reward_model):
    """(status, score, reward) of a response by its row's verifier alone."""
    verifier, text = JUDGES[group["prompt"]], response["text"]
    if verifier == "math":
        is_right = text.endswith(f"Answer: {group['answer']}")
        return "correct" if is_right else "wrong", None, 1.0 if is_right else -1.0
    if verifier == "judge":
        # Strict ignores case; its score is the answer's share of the text.
        score = len(group["answer"]) / len(text)
        return "correct" if score >= 0.5 else "wrong", score, -2 + 4 * score
    words = [group["prompt"], *response["tokens"]["pieces"]]
    vocabulary = {f"w{i}": i for i in range(3, MODEL["vocab"] - 2)}
    vocabulary |= {answer: MODEL["vocab"] - 2 + i for i, answer in enumerate(ANSWERS)}
    tokens = torch.tensor([[vocabulary[word] for word in words]])
    with torch.no_grad():
        hidden = reward_model.model(tokens, use_cache=False).last_hidden_state[0, -1]
        score = float(reward_model.lm_head(hidden))
    scaled = min(max((score - MEAN) / STD, -2), 2)
    return "correct" if score >= FROM else "wrong", score, scaled


def test_every_response_is_judged_by_its_rows_verifier_on_its_scale(run, place):
    _, steps, _ = run
    model = load_critic(str(place / "reward"))
    seen = {}
    for groups in steps:
        assert sum(len(group["responses"]) for group in groups) == NUM_RESPONSES
        for group in groups:
            source = next(s for s, rows in ROWS.items() if group["prompt"] in [r[0] for r in rows])
            assert group["verifier"] == JUDGES[group["prompt"]] and group["source"] == source
            for response in group["responses"]:
                status, score, reward = expected(group, response, model)
                assert response["status"] == status
                assert response.get("score") == (score and pytest.approx(score, abs=1e-5))
                assert response["reward"] == pytest.approx(reward, abs=1e-4)
                seen.setdefault(group["verifier"], set()).add((status, round(reward, 2)))
    assert seen.keys() == {"math", "judge", "taste"}
    # Both statuses of each, a reward that is clipped, and ones that are not.
    assert all({"correct", "wrong"} == {status for status, _ in some} for some in seen.values())
    assert len({r for _, r in seen["taste"]} & {-2, 2}) >= 1 and len(seen["taste"]) > 3
    assert len(seen["judge"]) > 3


def test_rows_tell_verifiers_and_sources_apart(run):
    rows, steps, _ = run
    for row, groups in zip(rows[1:], steps, strict=True):
        for kind in ("verifier", "source"):
            names = {group[kind] for group in groups}
            assert names == {n.split("/")[2] for n in row if n.startswith(f"reward/by_{kind}/")}
            for name in names:
                some = [r for g in groups if g[kind] == name for r in g["responses"]]
                of = f"reward/by_{kind}/{name}"
                found = {n.rpartition("/")[2]: x for n, x in row.items() if n.startswith(f"{of}/")}
                assert found == pytest.approx({
                    "share": len(some) / NUM_RESPONSES,
                    "accuracy": fmean(r["status"] == "correct" for r in some),
                    "reward_mean": fmean(r["reward"] for r in some),
                    "response_length_mean": fmean(r["num_tokens"] for r in some),
                    "failed_fraction": 0.0,
                })  # fmt: skip
        assert row["reward/by_source/sums/share"] == row["reward/by_verifier/math/share"] == 0.5
    # Of three responses to the first problem one is right, and to the last one, which is 8, two;
    # the judge's one has a word that is the larger part of a short text.
    for row in (rows[0], rows[-1]):
        found = {name: value for name, value in row.items() if name.startswith("evaluation/by_")}
        judge = found["evaluation/by_verifier/judge/avg@3"]
        assert found["evaluation/by_verifier/math/avg@3"] == pytest.approx((1 / 3 + 2 / 3) / 2)
        assert found["evaluation/by_source/numbers/avg@3"] == pytest.approx(2 / 3)
        assert found["evaluation/by_source/mixed/avg@3"] == pytest.approx((1 / 3 + judge) / 2)
        assert row["evaluation/avg@3"] == pytest.approx((1 / 3 + 2 / 3 + judge) / 3)
        # 1 for a right answer, -1 for a wrong one.
        assert found["evaluation/by_source/numbers/reward_mean"] == pytest.approx(1 / 3)
        assert len(found) == 2 * 2 * 3, "accuracy, reward and length of each name"


def test_a_replay_tells_them_apart_too(run, workers, place):
    rows, steps, _ = run
    ((again, replayed, _),) = workers.run(1, fit, place, "again", place / "run")
    for row, same in zip(rows[1:], again[1:], strict=True):
        by_name = {name: value for name, value in row.items() if name.startswith("reward/")}
        assert len(by_name) > 30
        assert by_name == {name: v for name, v in same.items() if name.startswith("reward/")}
    assert [g["verifier"] for g in replayed[0]] == [g["verifier"] for g in steps[0]]


COUNTS = [
    "data.sources.poems, 2 rows: judged by taste (2)",
    "data.sources.sums, 2 rows: judged by math (2)",
    "data.sources.words, 2 rows: judged by judge (2)",
]


def test_who_judges_how_much_is_told_at_the_start_and_by_a_dry_run(run, place, capsys, monkeypatch):
    assert run[2][0] == "; ".join(COUNTS)
    # Nothing samples here, and vLLM on a CPU takes no heads of 16.
    monkeypatch.setattr(sampled, "_is_cpu_build", lambda: False)
    (place / "config.yaml").write_text(settings_of(place, "dry").to_yaml())
    assert main(["--config", str(place / "config.yaml"), "--dry-run"]) == 0
    told = capsys.readouterr().out.splitlines()
    held_out = [
        "evaluation.sources.mixed, 2 rows: judged by math (1), judge (1)",
        "evaluation.sources.numbers, 1 rows: judged by math (1)",
    ]
    assert told[-5:] == [f"# {line}" for line in [*COUNTS, *held_out]]
