"""Locks and keys: problems, judge, tokens, exact values, credit, and the oracle's values.

Not exercised: a base model that is made to the end, which test_credit.py's slow test has.
"""

import itertools
import json
import random
from array import array
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tests.examples.tiny import ROOT
from vapo_megatron.config import load_config
from vapo_megatron.data.batch import RolloutBatch, bounds
from vapo_megatron.data.problems import Problem as Row
from vapo_megatron.data.rollout import Prompt, Rollout, ScoredRollout

# isort: split
import make_tokenizer
from credit import base as keys_base
from credit import keys
from credit import measures as keys_credit
from credit import train as keys_train
from credit import values as keys_values
from credit.keys import FORMS, Problem

THREE = Problem(2, (3, 55, 3))
GOOD, BAD = "1:L03x03[1]!!#$%&,", "1:L03y03[2]!!#$%&,"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("keys")
    form = FORMS["keys_mixed"]
    make_tokenizer.save_tokenizer(directory, 1024, keys.CHARACTERS, form.added_tokens)
    return AutoTokenizer.from_pretrained(str(directory))


def text(*steps):
    return "".join(f"{i}:{step}[0]!!!!!!," for i, step in enumerate(steps, 1))


@pytest.mark.parametrize(
    ("response", "opened"),
    [
        (text("L03x03", "L55x55", "L03x03"), 3),
        (text("L03x03", "L55y55", "L03x03"), 2),
        (text("L03y03", "L55y55", "L03x03"), 1),
        # Another kind's good key, the wrong lock, and a lock out of order.
        (text("L03x55", "L55x55", "L03x03"), 2),
        (text("L55x55", "L55x55", "L03x03"), 2),
        (text("L55x55", "L03x03", "L03x03"), 1),
        # The distance and the fillers do not matter; steps beyond the problem do not count.
        ("1:L03x03[17],2:L55x55!,3:L03y03,4:L03x03,", 2),
        (text("L03x03", "L55y55", "L03y03", "L03x03", "L03x03"), 1),
        # A step counts in its own place: the second is empty.
        ("1:L03x03[1],,2:L55x55[0],", 1),
        ("", 0),
    ],
)
def test_the_judge_counts_the_locks_that_are_opened(response, opened):
    for goal in (1, 2, 3):
        row = Row(Problem(goal, THREE.kinds).prompt, str(goal))
        assert keys.Judge().check(row) is None
        (verdict,) = keys.Judge().score([response], [row])
        assert verdict.status == ("correct" if opened >= goal else "wrong")
        assert verdict.answer == str(opened)


def test_other_prompts_are_refused():
    for prompt in ("", "Qa9b*2=", THREE.prompt[:-1], THREE.prompt.replace("2:", "3:")):
        assert "no prompt of this task" in keys.Judge().check(Row(prompt, "1"))
    assert keys.read_problem(THREE.prompt) == THREE


@pytest.mark.parametrize("name", FORMS)
def test_a_step_has_eleven_tokens_and_text_survives(name, tokenizer):
    form, rng = FORMS[name], random.Random(0)
    for _ in range(20):
        problem = keys.draw_problem(rng, held_out=False, form=form)
        response = keys.write_response(rng, problem, form)
        prompt_ids, ids = tokenizer([problem.prompt, response])["input_ids"]
        assert len(prompt_ids) == 3 + 2 * len(problem.kinds)
        assert len(ids) == keys.STEP_TOKENS * len(problem.kinds) < form.max_response_tokens
        assert tokenizer.decode(prompt_ids) == problem.prompt
        assert "".join(tokenizer.decode([i]) for i in ids) == response


def test_the_forms():
    assert FORMS["keys"].goals(20) == range(10, 18)
    assert FORMS["keys"].goals(1) == range(1, 2)
    rng = random.Random(0)
    drawn = [keys.draw_problem(rng, held_out=False, form=FORMS["keys_mixed"]) for _ in range(500)]
    assert {len(p.kinds) for p in drawn} == set(range(5, 21))
    rare = FORMS["keys_rare"]
    drawn = [keys.draw_problem(rng, held_out=False, form=rare) for _ in range(50)]
    assert {kind for p in drawn for kind in p.kinds} == set(range(rare.num_kinds))
    chances = [rare.base_probability(kind) for kind in range(100)]
    in_problems = chances[: rare.num_kinds]
    assert in_problems.count(rare.rare) == rare.num_rare == 2 and in_problems.count(0.5) == 3
    # Over 4,000 locks: the mean of what the form asks for, +- .008.
    problem = Problem(10, tuple(range(100)) * 40)
    shares = {}
    for name, expected in (("keys", 0.5), ("keys_rare", sum(chances) / 100)):
        response = keys.write_response(rng, problem, FORMS[name])
        shares[name] = keys.count_open(problem, response) / 4000
        assert shares[name] == pytest.approx(expected, abs=0.03)


def test_held_out_problems_are_never_trained_on():
    form = FORMS["keys"]
    train, test = keys.training_problems(500, 0, form), keys.test_problems(64, 1, form)
    assert train == keys.training_problems(500, 0, form) != keys.training_problems(500, 1, form)
    assert len(set(test)) == 64 and all(keys.is_held_out(p.prompt) for p in test)
    assert not any(keys.is_held_out(p.prompt) for p in train)


MOMENT = keys_base.Recipe(
    iterations=1, batch_size=2, batches_per_pool=1, more_iterations=1, most_rounds=1
)


def test_a_base_model_that_copies_wrongly_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="2 iterations .* 0.0... of its copies right, and 0.999"):
        keys_base.make(tmp_path / "base", MOMENT)
    assert list(tmp_path.iterdir()) == []


def test_such_a_base_model_is_trained_on_and_sharpened_once(tmp_path, monkeypatch):
    tried = []

    def found(model, *_):
        tried.append(model.lm_head.weight.clone())
        return len(tried) - 1.0

    monkeypatch.setattr(keys_base, "copied", found)
    assert keys_base.make(tmp_path / "base", MOMENT)
    first, second = tried
    # The second round starts at a learning rate of 0.
    torch.testing.assert_close(first, second, rtol=1e-6, atol=0)
    assert load_file(tmp_path / "base/model.safetensors")["lm_head.weight"].equal(second)


@pytest.mark.parametrize("place, share", [(0, 0.95), (1, 0.95), (2, 0.95), (3, 1.0), (None, 1.0)])
def test_a_step_is_copied_if_label_lock_and_either_key_are(tokenizer, place, share):
    """A model that is certain of a right response, but for a place of the first step of 20."""

    def model(ids):
        following = ids[0].roll(-1)
        start = 3 + 2 * 20
        if place is not None:
            following[start + place - 1] = 1
        if place is None:  # The other key is as good.
            (key,) = tokenizer.convert_ids_to_tokens(ids[0, start + 2 : start + 3])
            other = ("y" if key[0] == "x" else "x") + key[1:]
            following[start + 1] = tokenizer.convert_tokens_to_ids(other)
        hot = torch.nn.functional.one_hot(following, len(tokenizer))
        return SimpleNamespace(logits=1e4 * hot[None])

    found = keys_base.copied(model, tokenizer, FORMS["keys"], responses=2)
    assert found == pytest.approx(share)


def test_fillers_weigh_less(tokenizer):
    labels = torch.tensor([tokenizer("1:L03x03[1]!,")["input_ids"] + [-100]])
    weights = keys_base.weigh(labels, labels, keys_base.Recipe(filler_weight=0.25), tokenizer)
    assert weights.tolist() == [[1, 1, 1, 1, 0.25, 1, 1]]


def test_a_base_model_first_reads_short_problems():
    recipe, rng = keys_base.Recipe(), random.Random(0)
    for progress, lengths in ((0.69, range(1, 21)), (0.7, range(20, 21))):
        texts = [keys_base.training_text(rng, recipe, progress) for _ in range(200)]
        problems = [keys.read_problem(prompt) for prompt, _ in texts]
        assert {len(problem.kinds) for problem in problems} == set(lengths)
        assert not any(keys.is_held_out(problem.prompt) for problem in problems)
        for problem, (_, response) in zip(problems, texts, strict=True):
            assert response.count(",") == len(problem.kinds)


def test_a_further_round_has_long_problems_from_the_start():
    recipe = keys_base.Recipe(seed=2).further(1)
    assert (recipe.seed, recipe.iterations) == (1002, recipe.more_iterations)
    text = keys_base.training_text(random.Random(0), recipe, 0.0)
    assert len(keys.read_problem(text[0]).kinds) == 20


def by_enumeration(problem, opened, left, chances):
    """V by all outcomes of the locks that are left."""
    total = 0.0
    for outcome in itertools.product((0, 1), repeat=len(left)):
        chance = 1.0
        for kind, is_open in zip(left, outcome, strict=True):
            chance *= chances[kind] if is_open else 1 - chances[kind]
        total += chance * (opened + sum(outcome) >= problem.goal)
    return 2 * total - 1


def test_values_are_those_of_all_outcomes(tokenizer):
    rng = random.Random(0)
    chances = np.array([rng.random() for _ in range(keys.NUM_KINDS)])
    problems, paths, responses = [], [], []
    for size in (1, 3, 5, 6):
        problem = Problem(rng.randint(1, size), tuple(rng.randrange(100) for _ in range(size)))
        response = keys.write_response(rng, problem, FORMS["keys"])
        problems.append(problem)
        responses.append(response)
        paths.append(keys_values.follow(problem, tokenizer.tokenize(response) + ["<|endoftext|>"]))
    rewards = [
        1.0 if keys.count_open(p, r) >= p.goal else -1.0
        for p, r in zip(problems, responses, strict=True)
    ]
    found = keys_values.values(problems, paths, chances, rewards)
    for problem, response, reward, of_states in zip(
        problems, responses, rewards, found, strict=True
    ):
        assert len(of_states) == 11 * len(problem.kinds) + 2
        opened = 0
        for i, step in enumerate(response.split(",")[:-1]):
            before = by_enumeration(problem, opened, problem.kinds[i:], chances)
            opened += "x" in step
            after = by_enumeration(problem, opened, problem.kinds[i + 1 :], chances)
            # The key is the third token of a step.
            expected = [before] * 3 + [after] * 8
            np.testing.assert_allclose(of_states[11 * i : 11 * (i + 1)], expected, atol=1e-12)
        # After the last key nothing is left to chance.
        np.testing.assert_allclose(of_states[-9:], reward, atol=1e-12)


@pytest.mark.parametrize(
    ("first", "lost_at", "decided"),
    [
        (["2:", "L03", "x03", "["], 0, 1),
        (["1:", "L55", "x03", "["], 1, 1),
        (["1:", "L03", "x55", "["], 2, 1),
        (["1:", ","], 1, 1),
        ([","], 0, 1),
        (["1:", "L03", "x03", "["], None, 1),
    ],
)
def test_a_lock_is_lost_by_whatever_stands_where_it_should_not(first, lost_at, decided):
    rest = [] if "," in first else ["!", ","]
    tokens = [*first, *rest, "2:", "L55", "x55", "!", ",", "<|endoftext|>"]
    path = keys_values.follow(THREE, tokens)
    assert path.decided[len(first + rest)] == decided
    assert path.opened[-1] == (1 if lost_at is not None else 2)
    assert list(path.opened[[0, -1]]) == [0, keys.count_open(THREE, "".join(tokens[:-1]))]
    if lost_at is not None:
        assert list(path.decided[: lost_at + 2]) == [0] * (lost_at + 1) + [1]
        assert len(path.key_tokens) == 1
    assert path.is_good.all()


def test_the_policys_chances_come_from_what_it_sampled():
    tokens = ["1:", "L03", "x03", ",", "2:", "L55", "y55", ",", "3:", "L03", "y03", ","]
    path = keys_values.follow(THREE, tokens)
    logprobs = np.zeros(len(tokens))
    logprobs[path.key_tokens] = np.log([0.6, 0.9, 0.2])
    found = keys_values.chances_of([THREE], [path], [logprobs])
    # Kind 3: x with .6 and not y with .2; kind 55: not y with .9; others: the mean of .6, .1, .8.
    assert found[3] == pytest.approx(0.7) and found[55] == pytest.approx(0.1)
    assert found[0] == pytest.approx(0.5)


def response(tokens, reward, advantages, values=None):
    logprobs = np.full(len(tokens), np.log(0.5))
    problem = Problem(1, (3, 55))
    return keys_credit.Response(problem, tokens, reward, logprobs, advantages, values)


def test_credit_by_hand():
    first = ["1:", "L03", "x03", "!", ",", "2:", "L55", "y55", "!", ","]
    second = ["1:", "L03", "y03", "!", ",", "2:", "L55", "y55", "!", ","]
    # p = 1/2, one of two locks wanted: V is .5, then 1 or 0; from 0 the second key makes it -1.
    true = [np.diff(v) for v in ([0.5] * 3 + [1] * 8, [0.5] * 3 + [0] * 5 + [-1] * 3)]
    values = [np.full(10, 0.25), np.full(10, 0.75)]
    both = [
        response(first, 1.0, 3 * true[0] + 0.1, values[0]),
        response(second, -1.0, 3 * true[1] + 0.1, values[1]),
    ]
    known = keys_credit.exact(both)
    for found, expected in zip(known.values, true, strict=True):
        np.testing.assert_allclose(np.diff(found), expected)
    found = keys_credit.credit(both, known)
    assert found.key_correlation == pytest.approx(1.0)
    # Fillers have .1 each; keys 1.6, .1, -1.4 and -2.9: 1.5 on average.
    assert found.noise_ratio == pytest.approx(0.1 / 1.5)
    assert found.true_advantage == pytest.approx((0.5 + 0 + 0.5 + 1) / 4)
    assert (found.good_keys, found.copied) == (0.25, 1.0)
    # .25 and .75 before the first keys, where V is .5; before the second ones V is 1 and 0.
    np.testing.assert_allclose(found.value_bias_by_lock, [0, 0], atol=1e-12)
    np.testing.assert_allclose(found.value_spread_by_lock, [0.25, 0.75])
    # The exact values are .5, .5, .5 and 1 x 7; .5 x 3, 0 x 5 and -1 x 2, the returns +-1.
    best = np.array([0.5] * 3 + [1] * 7 + [0.5] * 3 + [0] * 5 + [-1] * 2)
    rewards = np.repeat([1.0, -1.0], 10)
    assert found.best_explained_variance == pytest.approx(1 - np.var(rewards - best))
    # Errors .75 and -1.75, variance 1.25 ** 2, of returns of variance 1.
    assert found.explained_variance == pytest.approx(1 - 1.25**2)
    # One step of four is not copied.
    wrong = response(["2:", *first[1:]], 1.0, np.zeros(10))
    partly = keys_credit.credit([wrong, both[0]], keys_credit.exact([wrong, both[0]]))
    assert partly.copied == 0.75 and partly.value_error is None


def test_advantages_without_differences_have_no_correlation():
    tokens = ["1:", "L03", "x03", "!", ","]
    flat = [response(tokens, 1.0, np.zeros(5))]
    found = keys_credit.credit(flat, keys_credit.exact(flat))
    assert (found.key_correlation, found.noise_ratio) == (None, None)


def test_rows_are_json():
    tokens = ["1:", "L03", "x03", "!", ","]
    some = [response(tokens, 1.0, np.arange(5.0), np.zeros(5))]
    row = keys_credit.row(7, keys_credit.credit(some, keys_credit.exact(some)))
    assert row["step"] == 7 and len(row["chances"]) == 100
    assert all(isinstance(v, int | float | list | None) for v in row.values())


def a_trainer(run_dir, tokenizer, *, oracle):
    """A KeysTrainer as far as advantages go, which need neither models nor other processes."""
    trainer = keys_train.KeysTrainer.__new__(keys_train.KeysTrainer)
    files = [ROOT / "examples" / "configs" / name for name in ("tiny.yaml", "keys_tiny.yaml")]
    trainer.config = load_config(files, ["algorithm.lambda_actor=0.5"])
    trainer.run_dir, trainer.ranks = run_dir, None
    trainer.source = SimpleNamespace(decode=lambda ids: tokenizer.decode(list(ids)))
    trainer._oracle, trainer._step = oracle, 4
    return trainer


@pytest.mark.parametrize("oracle", [False, True])
def test_an_oracle_puts_exact_values_in_place_of_the_critics(tmp_path, tokenizer, oracle):
    problem = Problem(1, (3, 55))
    texts = [text("L03x03", "L55y55"), text("L03y03", "L55y55")]
    scored, rewards = [], [1.0, -1.0]
    for position, response in enumerate(texts):
        prompt = Prompt(0, problem.prompt, tuple(tokenizer(problem.prompt)["input_ids"]), "1")
        ids = array("i", [*tokenizer(response)["input_ids"], 1])
        rollout = Rollout(prompt, position, position, ids, array("f", [0.0] * len(ids)), False, 0)
        scored.append(ScoredRollout(rollout, response, "wrong", rewards[position]))
    # The batch has them in another order than the sampler.
    order = [1, 0]
    lengths = torch.tensor([len(scored[i].rollout.token_ids) for i in order])
    size = int(lengths.sum())
    logprobs = torch.full((size,), 0.5).log()
    batch = RolloutBatch(
        tokens=torch.zeros(size, dtype=torch.long), sequence_cu_seqlens=bounds(lengths),
        cu_seqlens=bounds(lengths), positions=torch.tensor(order),
        rewards=torch.tensor([rewards[i] for i in order]),
        is_correct=torch.tensor([False, True]), truncated=torch.tensor([False, False]),
        rollout_logprobs=logprobs, loss_mask=torch.ones(size, dtype=torch.bool),
        old_logprobs=logprobs, values=torch.full((size,), 0.125),
    )  # fmt: skip
    trainer = a_trainer(tmp_path, tokenizer, oracle=oracle)
    (tmp_path / "credit.jsonl").write_text('{"step": 3}\n{"step": 4}\n{"step": 5}\n')
    found = trainer.with_advantages(scored, None, batch)
    # By hand: p = 1/2; the first response of the batch fails at its second key.
    failing, solving = [0.5] * 3 + [0.0] * 11 + [-1.0] * 9, [0.5] * 3 + [1.0] * 20
    if oracle:
        expected = torch.tensor(failing + solving)
    else:
        expected = torch.full((size,), 0.125)
    torch.testing.assert_close(found.values, expected)
    assert float(found.advantages[22]) == pytest.approx(-1 - float(expected[22]))
    rows = [json.loads(line) for line in (tmp_path / "credit.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [3, 4], "those of repeated steps are replaced"
    assert rows[1]["good_keys"] == 0.25 and rows[1]["copied"] == 1.0
    if oracle:
        assert rows[1]["value_error"] == 0
    else:
        exact = torch.tensor(failing + solving)
        assert rows[1]["value_error"] == pytest.approx(
            float((exact - 0.125).square().mean().sqrt()), abs=1e-4
        )


def test_a_run_of_one_process_starts_and_others_are_refused(tmp_path, monkeypatch, capsys):
    seen = {}

    class Trainer:
        def __init__(self, config, inputs, *, oracle):
            seen.update(seed=config.seed, problems=inputs, oracle=oracle)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def fit(self):
            seen["fitted"] = True

    monkeypatch.setattr(keys_train, "KeysTrainer", Trainer)
    monkeypatch.setattr(keys_train, "check_inputs", lambda config, replay: "checked")
    environment = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": 0, "MASTER_PORT": 0}
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    configs = [ROOT / "examples/configs" / name for name in ("tiny.yaml", "keys_tiny.yaml")]
    files = [part for file in configs for part in ("--config", str(file))]
    assert keys_train.main([*files, "--oracle", "seed=7"]) == 0
    assert seen == {"seed": 7, "problems": "checked", "oracle": True, "fitted": True}
    for field, told in (
        ("parallel.world_size=2", "parallel.world_size=2 must be 1"),
        ("algorithm.advantage_estimator=grpo", "--oracle: this configuration has no critic"),
    ):
        assert keys_train.main([*files, "--oracle", field]) == 2
        assert told in capsys.readouterr().err
