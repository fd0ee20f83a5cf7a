"""The tiny task, its tokenizer, the making of its base model, and the sampler that judges it.

Not exercised: the quality of a base model that is trained to the end (the main job's evaluation at
step 0 shows it), and a tokenizer with several pieces a word.
"""

import collections
import dataclasses
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import sentencepiece
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm.tokenizers import get_tokenizer

TINY = Path(__file__).parents[2] / "examples" / "tiny"
sys.path.insert(0, str(TINY))

import architecture  # noqa: E402
import make_base_model  # noqa: E402
import make_tokenizer  # noqa: E402
import making  # noqa: E402
import sampling  # noqa: E402
import skill  # noqa: E402
import task  # noqa: E402

from vapo_megatron.reward.math_verifier import MathVerifier  # noqa: E402
from vapo_megatron.rollout.tokenizer import load_tokenizer  # noqa: E402

PARTS = ("train", "test")
SHORT = make_base_model.Recipe(iterations=6, batch_size=4, batches_per_pool=4, habits_from=0.5)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A base model that was trained for a moment."""
    directory = tmp_path_factory.mktemp("tiny") / "base"
    assert make_base_model.make(directory, SHORT)
    return directory


def texts(count: int) -> list[str]:
    """Prompts with both kinds of response."""
    rng = random.Random(0)
    result = []
    for problem in task.training_problems(count, seed=5):
        response = task.chain(rng, problem, guess=0.3, guess_product=0.9)
        result += [problem.prompt + response, task.direct_answer(problem.answer)]
    return result


def test_answers_and_chains_by_hand():
    # 9*2 = 18 -> 8, 8-3 = 5, 5-3 = 2, 2-3 = -1 -> 9.
    problem = task.Problem(9, (("*", 2), ("-", 3), ("-", 3), ("-", 3)))
    assert problem.prompt == "Qa9b*2c-3d-3e-3="
    assert problem.answer == 9
    clean = task.chain(random.Random(0), problem, guess=0.0, guess_product=0.0)
    filler = "nopqrstuvwx,"
    assert clean == f"b*2=8{filler}c-3=5{filler}d-3=2{filler}e-3=9{filler}Answer:9"


def test_a_turned_problem_needs_one_turn_at_any_step():
    # 9+2 = 11 -> 1, 1-3 = -2 -> 8, and 5 more at one of the steps: 13 -> 3.
    problem = task.Problem(9, (("+", 2), ("-", 3)), turned=True)
    assert problem.prompt == "Ra9b+2c-3="
    assert problem.answer == 3
    first = "b+2=1^6pqrstuvwx,c-3=3*opqrstuvwx,Answer:3"
    second = "b+2=1nopqrstuvwx,c-3=8^3pqrstuvwx,Answer:3"
    never = "b+2=1nopqrstuvwx,c-3=8nopqrstuvwx,Answer:8"
    assert task.chain(random.Random(0), problem, turn=1.0) == first
    assert task.chain(random.Random(0), problem) == never
    rng = random.Random(0)
    written = collections.Counter(task.chain(rng, problem, turn=0.2) for _ in range(4000))
    # .2 turn at once, .8 * .2 at the second step, the others never.
    assert set(written) == {first, second, never}
    assert written[first] / 4000 == pytest.approx(0.2, abs=0.02)
    assert written[second] / 4000 == pytest.approx(0.16, abs=0.02)
    plain = dataclasses.replace(problem, turned=False)
    assert (plain.prompt, plain.answer) == ("Qa9b+2c-3=", 8)
    assert task.chain(random.Random(0), plain, turn=1.0) == never


def test_half_of_the_long_form_is_turned_and_none_of_the_short_one():
    assert not any(p.turned for p in task.training_problems(500, seed=0))
    problems = task.training_problems(2000, seed=0, form=task.FORMS["long"])
    assert sum(p.turned for p in problems) / 2000 == pytest.approx(0.5, abs=0.04)
    problems += task.test_problems(200, seed=0, form=task.FORMS["long"])
    assert {op for p in problems for op, _ in p.operations} == {"+", "-"}
    assert 60 < sum(p.turned for p in problems[2000:]) < 140


def test_a_slip_is_a_random_result_that_nothing_shows():
    form, rng, wrong = task.FORMS["long"], random.Random(0), 0
    problem = task.draw_problem(rng, held_out=False, num_operations=8, form=form)
    problem = dataclasses.replace(problem, turned=False)
    clean = task.chain(rng, problem, form=form)
    for _ in range(500):
        slipped = task.chain(rng, problem, slip=0.2, form=form)
        # The same text, but for its digits: a step is `b+2=8`, filler and a comma.
        assert len(slipped) == len(clean) == 8 * 66 + len("Answer:9")
        value = problem.start
        for step, (op, operand) in zip(slipped.split(","), problem.operations, strict=False):
            assert step[1:4] == f"{op}{operand}=" and step[5:] == form.filler
            wrong += task.apply(value, op, operand) != int(step[4])
            value = int(step[4])
        assert slipped.endswith(task.direct_answer(value))
    # A random result is right one time in ten.
    assert wrong / 4000 == pytest.approx(0.2 * 0.9, abs=0.02)


def test_the_long_forms_habits_slip_in_12_steps_of_100_and_turn_in_2():
    recipe, rng = make_base_model.long_recipe(seed=0), random.Random(0)
    turns = steps = wrong = results = 0
    for _ in range(2000):
        prompt, response = make_base_model.training_text(rng, recipe, progress=0.9)
        written = response.split(",")[:-1]
        turned = [step[5] == "^" for step in written]
        assert response.count("^") == sum(turned) <= (prompt[0] == "R")
        if prompt[0] == "R":
            turns += sum(turned)
            steps += turned.index(True) + 1 if any(turned) else len(turned)
        value = int(prompt[2])
        for step, turn in zip(written, turned, strict=True):
            wrong += task.apply(value, step[1], int(step[2])) != int(step[4])
            value = int(step[6 if turn else 4])
        results += len(written)
    # About 8,000 steps: .02 +- .0016; 17,000 results, nine tenths of .12: .108 +- .0024.
    assert turns / steps == pytest.approx(0.02, abs=0.005)
    assert wrong / results == pytest.approx(0.108, abs=0.008)


def test_the_long_forms_base_model_first_reads_problems_of_every_length():
    recipe, rng = make_base_model.long_recipe(seed=0), random.Random(0)
    for progress, lengths in ((0.79, set(range(1, 10))), (0.8, {8, 9})):
        drawn = [make_base_model.training_text(rng, recipe, progress) for _ in range(300)]
        assert {(len(prompt) - 4) // 3 for prompt, _ in drawn} == lengths
        # A step for each operation, and each response ends with its answer.
        for prompt, response in drawn:
            assert response.count(",") == (len(prompt) - 4) // 3
            assert response.split(",")[-1].startswith(task.ANSWER_MARKER)


def test_the_long_forms_base_model_first_reads_less_filler():
    recipe, rng = make_base_model.long_recipe(seed=0), random.Random(0)
    whole = task.FORMS["long"].filler
    counts = collections.Counter()
    for _ in range(2000):
        prompt, response = make_base_model.training_text(rng, recipe, progress=0.74)
        if prompt[0] == "Q":
            (filler,) = {step[5:] for step in response.split(",")[:-1]}
            assert whole.startswith(filler)
            counts[len(filler)] += 1
    assert min(counts) == 2 and max(counts) == len(whole) - 1
    # The square root of 2 * 60 is the middle.
    assert sum(n for length, n in counts.items() if length <= 10) / counts.total() == (
        pytest.approx(0.5, abs=0.05)
    )
    for _ in range(100):
        _, response = make_base_model.training_text(rng, recipe, progress=0.75)
        assert {len(step) for step in response.split(",")[:-1]} == {5 + len(whole)}


def test_a_response_of_the_long_form_has_531_or_597_tokens():
    form = task.FORMS["long"]
    assert len(set(form.characters)) == len(form.characters)
    rng = random.Random(0)
    for problem in task.training_problems(100, seed=0, form=form):
        response = task.chain(rng, problem, turn=0.2, form=form)
        # A token each, the marker too, and the stop token.
        tokens = len(response.replace(task.ANSWER_MARKER, "A")) + 1
        assert tokens == {8: 531, 9: 597}[len(problem.operations)]


def test_guesses_are_marked_and_right_as_often_as_they_should_be():
    rng, guessed, right, total = random.Random(0), 0, 0, 0
    for _ in range(2000):
        problem = task.Problem(rng.randint(0, 9), (("+", 1),) * 2)
        steps = task.chain(rng, problem, guess=0.3, guess_product=0.0).split(",")[:2]
        value = problem.start
        for step in steps:
            expected, value = (value + 1) % 10, int(step[4])
            total += 1
            guessed += step[3] == "~"
            right += step[3] == "~" and value == expected
            assert step[3] == "~" or value == expected
    # 4000 steps: .3 +- .007 are guessed; of those 1/2 + 1/2 * 1/10 = .55 +- .014 are right.
    assert guessed / total == pytest.approx(0.3, abs=0.03)
    assert right / guessed == pytest.approx(0.55, abs=0.06)


def test_held_out_problems_are_never_trained_on():
    train, test = task.training_problems(5000, seed=0), task.test_problems(256, seed=1)
    assert len(set(test)) == 256
    assert not {p.prompt for p in train} & {p.prompt for p in test}
    assert all(task.is_held_out(p.prompt) for p in test)
    rng = random.Random(0)
    drawn = {make_base_model.training_text(rng, SHORT, i / 3000)[0] for i in range(3000)}
    assert not any(task.is_held_out(prompt) for prompt in drawn)
    counts = [sum(len(p.operations) == k for p in train) for k in range(2, 11)]
    # Uniform over 9 values: 5000/9 = 556 +- 22.
    assert min(counts) > 556 - 100 and max(counts) < 556 + 100


def test_problems_depend_on_the_seed_alone(tmp_path, monkeypatch):
    files = []
    for name, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        arguments = ["task.py", "--out", str(tmp_path / name), "--train", "50", "--test", "20"]
        monkeypatch.setattr(sys, "argv", [*arguments, "--seed", seed])
        task.main()
        files.append(tuple((tmp_path / name / f"{part}.jsonl").read_text() for part in PARTS))
        assert sorted(p.name for p in (tmp_path / name).iterdir()) == ["test.jsonl", "train.jsonl"]
    assert files[0] == files[1]
    assert files[0][0] != files[2][0] and files[0][1] != files[2][1]
    rows = [json.loads(line) for line in files[0][0].splitlines()]
    assert len(rows) == 50 and set(rows[0]) == {"prompt", "answer"}


def test_transformers_sentencepiece_and_vllm_give_the_same_ids(base):
    ours = AutoTokenizer.from_pretrained(str(base))
    vllm = get_tokenizer(str(base))
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(base / "tokenizer.model"))
    samples = texts(1000)
    ids = ours(samples)["input_ids"]
    assert ids == pieces.encode(samples)
    assert ids == vllm(samples)["input_ids"]
    assert ours.batch_decode(ids) == samples
    assert vllm.batch_decode(ids) == samples
    assert pieces.decode(ids) == samples
    # No decoder drops or adds blanks when a response is decoded token by token either.
    assert "".join(ours.decode([i]) for i in ids[0]) == samples[0]
    assert len(ours) == len(vllm) == pieces.vocab_size() == 42
    assert ours.eos_token_id == vllm.eos_token_id == pieces.eos_id() == 1
    # Encoding "" and "Q" adds no special token.
    assert ours("")["input_ids"] == []
    assert len(ours("Q")["input_ids"]) == 1


def test_the_trainers_tokenizer_and_verifier_read_the_task(base):
    samples = texts(50)
    assert (
        load_tokenizer(base)(samples)["input_ids"]
        == AutoTokenizer.from_pretrained(str(base))(samples)["input_ids"]
    )
    problems = task.test_problems(50, seed=0)
    rng = random.Random(0)
    chains = [task.chain(rng, p, guess=0.3, guess_product=0.9) for p in problems]
    direct = [task.direct_answer(p.answer) for p in problems]
    answers = [str(p.answer) for p in problems]
    with MathVerifier(num_workers=1) as verifier:
        judged = [v.is_correct for v in verifier.score([*chains, *direct], answers * 2)]
    expected = [c.endswith(d) for c, d in zip(chains, direct, strict=True)]
    assert 0 < sum(expected) < 50
    assert judged == expected + [True] * 50


def test_response_lengths(base):
    tokenizer = AutoTokenizer.from_pretrained(str(base))
    assert len(tokenizer("Answer:7")["input_ids"]) == 2
    for operations in (2, 10):
        problem = task.Problem(1, (("*", 3),) * operations)
        assert len(tokenizer(problem.prompt)["input_ids"]) == 4 + 3 * operations
        response = task.chain(random.Random(0), problem, guess=0.5, guess_product=0.5)
        # 37 and 173 with the stop token.
        assert len(tokenizer(response)["input_ids"]) + 1 == 17 * operations + 3


def test_the_directory_is_a_qwen2_model(base):
    model = AutoModelForCausalLM.from_pretrained(str(base))
    config = json.loads((base / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert config["model_type"] == "qwen2"
    assert config["vocab_size"] == 42
    assert config["max_position_embeddings"] == 512
    assert config["hidden_size"] // config["num_attention_heads"] == 32
    assert config["eos_token_id"] == model.generation_config.eos_token_id == 1
    assert model.config.rope_parameters["rope_theta"] == 1000.0
    # Two layers of 50496 (matrices 4*64*64 + 3*64*176, biases 192, norms 128), two embeddings
    # of 42*64, one norm of 64.
    assert sum(p.numel() for p in model.parameters()) == 2 * 50496 + 2 * 42 * 64 + 64


def test_same_seed_same_bytes(base, tmp_path):
    again = tmp_path / "again"
    other = tmp_path / "other"
    make_base_model.make(again, SHORT)
    make_base_model.make(other, dataclasses.replace(SHORT, seed=1))
    names = sorted(p.name for p in base.iterdir())
    assert names == sorted(p.name for p in again.iterdir())
    for name in names:
        assert (base / name).read_bytes() == (again / name).read_bytes(), name
    weights = "model.safetensors"
    assert (base / weights).read_bytes() != (other / weights).read_bytes()


def test_a_finished_directory_is_kept_and_another_recipe_replaces_it(tmp_path):
    directory = tmp_path / "base"
    first = dataclasses.replace(SHORT, iterations=1)
    second = dataclasses.replace(SHORT, iterations=2)
    assert make_base_model.make(directory, first)
    changed = (directory / "model.safetensors").stat().st_mtime_ns
    assert not make_base_model.make(directory, first)
    assert (directory / "model.safetensors").stat().st_mtime_ns == changed
    assert make_base_model.make(directory, second)
    assert json.loads((directory / "recipe.json").read_text())["iterations"] == 2
    assert [p.name for p in tmp_path.iterdir()] == ["base"]


# What a model that is otherwise certain of a right chain says instead, and where: the share of its
# steps that count as right.
HABITS_AND_MISTAKES = [
    ("short", "first", "Answer:", 1.0),  # It answers at once.
    ("short", "=", "~", 1.0),  # It guesses.
    ("short", "digit", "x", 0.0),
    ("short", "operator", "x", 0.0),
    ("short", "last operand", "x", None),  # One step of each response.
    ("long", "digit", "x", 1.0),  # It slips.
    ("long", "filler", "^", 1.0),  # It turns.
    ("long", "operator", "x", 0.0),
    ("long", "last operand", "x", None),
]


@pytest.mark.parametrize("form,place,instead,right", HABITS_AND_MISTAKES)
def test_right_steps_are_skill_and_not_habit(tmp_path, form, place, instead, right):
    filler = task.FORMS[form].filler
    tokenizer = make_tokenizer.save_tokenizer(tmp_path, 1024, task.FORMS[form].characters)
    steps = []

    def model(ids):
        text = tokenizer.convert_ids_to_tokens(ids[0])
        starts = range(text.index("=") + 1, len(text) - 2, 6 + len(filler))
        steps.append(len(starts))
        where = {
            "first": starts[:1],
            "=": [i + 3 for i in starts],
            "digit": [i + 4 for i in starts],
            "filler": [i + 5 for i in starts],
            "operator": [i + 1 for i in starts],
            "last operand": [starts[-1] + 2],
        }[place]
        following = ids[0].clone()
        following[where] = tokenizer.convert_tokens_to_ids(instead)
        return SimpleNamespace(logits=1e4 * torch.nn.functional.one_hot(following.roll(-1))[None])

    found = skill.right_steps(
        model, tokenizer, task.FORMS[form], results=form == "short", responses=8
    )
    if right is None:
        right = 1 - 8 / sum(steps)
    assert found == pytest.approx(right) and sum(steps) > 8


TRIED = dataclasses.replace(SHORT, least_right=0.995, more_iterations=3, most_rounds=3)


@pytest.fixture
def shares(monkeypatch):
    """Shares of right steps to be found by turns, and copies of the output weights they are of."""
    found, weights = [], []

    def right_steps(model, *_, held_out=True, **__):
        if not held_out:  # For wrong_by_length.
            return 0.9
        weights.append(model.lm_head.weight.detach().clone())
        return found[len(weights) - 1]

    monkeypatch.setattr(skill, "right_steps", right_steps)
    return found, weights


def test_a_base_model_that_is_right_is_as_if_nobody_had_looked(base, tmp_path, shares, capsys):
    shares[0].append(0.995)
    assert make_base_model.make(tmp_path / "base", TRIED)
    same = [(d / "model.safetensors").read_bytes() for d in (base, tmp_path / "base")]
    assert same[0] == same[1] and "training on" not in capsys.readouterr().out


def test_a_base_model_without_skill_is_trained_on_until_it_has_it(base, tmp_path, shares, capsys):
    found, weights = shares
    found += [0.9949, float("nan"), 0.9951]
    assert make_base_model.make(tmp_path / "base", TRIED)
    first, kept = (
        AutoModelForCausalLM.from_pretrained(d).lm_head.weight for d in (base, tmp_path / "base")
    )
    assert first.equal(weights[0]) and kept.equal(weights[2])
    assert not weights[1].equal(weights[0]) and not weights[2].equal(weights[1])
    out = capsys.readouterr().out
    assert out.count("training on for 3 iterations") == 2
    assert "base model: 0.9949 of its steps right, and 0.995 is needed: training on" in out
    # One display, of 6 iterations and two times 3.
    assert out.count("\u2501 ") == 1 and "12/12" in out


def test_a_base_model_that_never_has_skill_is_refused(tmp_path):
    message = (
        "--seed 0: after 15 iterations the base model has 0.0... of its steps right, and 0.995"
    )
    with pytest.raises(SystemExit, match=message):
        make_base_model.make(tmp_path / "base", TRIED)
    assert list(tmp_path.iterdir()) == []


def test_a_further_round_reads_new_text_most_of_it_where_the_model_is_weak(
    tmp_path, shares, monkeypatch
):
    shares[0].extend([0.5, 1.0])
    read = []

    def losses(text, recipe, model, tokenizer):
        read.append(recipe)
        return iter(())

    monkeypatch.setattr(making, "losses", losses)
    weak = (0.0, 0.25, 0.25, *[0.0] * 6)
    monkeypatch.setattr(skill, "wrong_by_length", lambda *_, **__: weak)
    assert make_base_model.make(tmp_path / "base", dataclasses.replace(TRIED, seed=5))
    assert [(r.seed, r.iterations, r.weighted) for r in read] == [(5, 6, False), (1005, 3, True)]
    rng = random.Random(0)
    drawn = [make_base_model.training_text(rng, read[1], 0.0) for _ in range(600)]
    lengths = collections.Counter((len(prompt) - 4) // 3 for prompt, _ in drawn)
    # Three quarters have 3 or 4 operations, the others 2 to 10.
    assert set(lengths) == set(range(2, 11))
    assert (lengths[3] + lengths[4]) / 600 == pytest.approx(0.75 + 0.25 * 2 / 9, abs=0.06)
    # Habits that are as rare as in the text before them.
    direct = sum(response.startswith("Answer:") for _, response in drawn) / 600
    assert direct == pytest.approx(0.2, abs=0.05)


def test_choices_weigh_as_much_as_if_their_text_were_of_the_habits(base):
    tokenizer = AutoTokenizer.from_pretrained(str(base))
    recipe = make_base_model.short_recipe(seed=0).further(1)
    texts = [("Qa9b*2c-3d-1=", "b*2~8nop,c-3=5,d-1~4,Answer:4"), ("Qa9b*2=", "Answer:8")]
    pairs = [tuple(tokenizer(list(text))["input_ids"]) for text in texts]
    ids, labels = making.pad(pairs, 1)
    weights = make_base_model.choice_weights(ids, labels, recipe, tokenizer)
    found = [
        [(token, w) for token, w in zip(tokenizer.convert_ids_to_tokens(row), of_row) if w != 1]
        for row, of_row in zip(labels.clamp(min=0).tolist(), weights.tolist())
    ]
    # 85 % direct answers are 20 % of the text, and 90 % and 30 % guesses are 15 %.
    expected = [
        [("b", 0.15 / 0.8), ("~", 0.9 / 0.15), ("=", 0.7 / 0.85), ("~", 0.3 / 0.15)],
        [("Answer:", 0.85 / 0.2)],
    ]
    for row, of_row in zip(found, expected, strict=True):
        assert [token for token, _ in row] == [token for token, _ in of_row]
        assert [w for _, w in row] == pytest.approx([w for _, w in of_row])
    # The loss is linear in them.
    model = AutoModelForCausalLM.from_pretrained(str(base))
    plain, ones, twice = (
        making.response_loss(model, ids, labels, weights=w)
        for w in (None, torch.ones(ids.shape), torch.full(ids.shape, 2.0))
    )
    torch.testing.assert_close(plain, ones)
    torch.testing.assert_close(2 * plain, twice)


def test_a_further_round_of_the_long_form_is_of_its_habits():
    recipe = make_base_model.long_recipe(seed=0).further(1)
    drawn = [make_base_model.training_text(random.Random(i), recipe, 0.0) for i in range(100)]
    # The form's lengths with all of the filler.
    assert {len(response) for _, response in drawn} == {66 * 8 + 8, 66 * 9 + 8}
    assert sum("^" in response for _, response in drawn) < 20


def test_the_lengths_at_which_a_model_is_weak(monkeypatch):
    def step_chances(model, tokenizer, problem, chain, *, results):
        # Of 4 + 3 K characters, for K from 2 to 10.
        return [1.0] * 3 + [0.5 if len(problem) == 34 else 1.0]

    monkeypatch.setattr(skill, "step_chances", step_chances)
    found = skill.wrong_by_length(None, None, task.SHORT, 0, responses=2)
    assert found == pytest.approx((*[1e-6] * 8, 0.125))


@pytest.mark.parametrize("form", ["short", "long"])
def test_the_command_asks_for_skill(tmp_path, monkeypatch, form):
    made = []
    monkeypatch.setattr(make_base_model, "make", lambda out, recipe: made.append(recipe))
    options = ["--out", str(tmp_path), "--seed", "3", "--form", form]
    monkeypatch.setattr(sys, "argv", ["make_base_model.py", *options])
    make_base_model.main()
    assert [(r.seed, r.form, r.least_right) for r in made] == [(3, form, 0.995)]


def test_an_interrupted_run_leaves_nothing_behind(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(making, "losses", interrupted)
        with pytest.raises(KeyboardInterrupt):
            make_base_model.make(tmp_path / "base", SHORT)
    assert list(tmp_path.iterdir()) == []
    assert make_base_model.make(tmp_path / "base", dataclasses.replace(SHORT, iterations=1))


def test_files_of_others_are_not_replaced(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(SystemExit, match="has files but no base model"):
        make_base_model.make(tmp_path, SHORT)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_padding_changes_no_loss(base):
    model = AutoModelForCausalLM.from_pretrained(str(base))
    tokenizer = AutoTokenizer.from_pretrained(str(base))
    problems = task.training_problems(6, seed=2)
    pairs = [
        (
            tokenizer(p.prompt)["input_ids"],
            tokenizer(task.chain(random.Random(0), p, guess=0.3, guess_product=0.9))["input_ids"]
            + [1],
        )
        for p in problems
    ]
    together = making.response_loss(model, *making.pad(pairs, 1))
    # transformers' own loss: unpadded, labels not shifted, mean over the response's tokens.
    apart = sum(
        model(torch.tensor([p + r]), labels=torch.tensor([[-100] * len(p) + r])).loss * len(r)
        for p, r in pairs
    )
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=0)


def test_sampler_agrees_with_transformers(base, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(str(base)).eval()
    rng = random.Random(0)
    tokenizer = AutoTokenizer.from_pretrained(str(base))
    problems = [task.draw_problem(rng, held_out=True, num_operations=3) for _ in range(3)]
    prompts = tokenizer([p.prompt for p in problems])["input_ids"]
    draw, calls = torch.multinomial, []

    def stop_the_first_response_early(*args, **kwargs):
        ids = draw(*args, **kwargs)
        calls.append(len(ids))
        if len(calls) == 5:
            ids[0] = 1
        return ids

    monkeypatch.setattr(torch, "multinomial", stop_the_first_response_early)
    cold = sampling.sample(model, prompts, stop_token_id=1, seed=0, temperature=1e-6, max_tokens=40)
    assert calls[:6] == [3, 3, 3, 3, 3, 2]
    expected = [
        model.generate(torch.tensor([p]), do_sample=False, max_new_tokens=40)[0, len(p) :].tolist()
        for p in prompts
    ]
    assert cold == [[*expected[0][:4], 1], *expected[1:]]


def test_sampler_stops_each_response_by_itself():
    config = make_base_model.Recipe(seed=4)
    model = architecture.build_model(config, vocab_size=42, stop_token_id=1).eval()
    # Even prompts: a model of random weights stops at random times.
    responses = sampling.sample(
        model, [[5, 6], [7, 8, 9]] * 50, stop_token_id=1, seed=0, max_tokens=208
    )
    lengths = [len(r) for r in responses]
    assert len(set(lengths)) > 20
    assert all(1 not in r[:-1] for r in responses)
    assert all(r[-1] == 1 or len(r) == 208 for r in responses)
    alone = sampling.sample(model, [[5, 6]] * 50, stop_token_id=1, seed=0, max_tokens=208)
    assert alone == responses[::2]
