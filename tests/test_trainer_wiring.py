"""What each step hands from one part to the next: every field that an update is given, by hand.

Whole trainers on two data-parallel ranks train on dumped responses. Each mini-batch that reaches an
update is compared, token by token, with what each response alone gives: its log-probabilities and
values in a forward pass of its own just before the step, and loops over those. What the losses make
of the fields is in tests/roles/test_roles.py, gradients are in tests/distributed. Not exercised:
sampling (tests/test_sampling_wiring.py), tensor and pipeline parallelism, offload
(tests/roles/test_device_schedule.py).
"""

import itertools
import math
from pathlib import Path
from statistics import fmean, pstdev, stdev

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

from tests import reference
from tests.cut import alone
from tests.dumped import (
    GROUP_SIZE,
    MODEL,
    NUM_RESPONSES,
    SOURCES,
    VERIFIERS,
    dump,
    rollouts,
)
from tests.weights.tiny_hf import write_tiny_hf
from tests.whole_run import settings, trainer
from vapo_megatron.errors import UserError

STEPS = range(3)
ALPHA, LAMBDA_CRITIC = 0.2, 0.9
VAPO = {
    "value_pretraining_steps": 1,
    "length_adaptive_alpha": ALPHA,
    "lambda_critic": LAMBDA_CRITIC,
    "kl_coef": 0.1,
    "sampler_correction": "icepop",
    "overlong_filtering": True,
    "advantage_whitening": True,
}
GRPO = {"advantage_estimator": "grpo", "policy_steps": 3, "positive_lm_coef": 0.0}
PER_TOKEN = (
    "loss_mask", "rollout_logprobs", "old_logprobs", "reference_logprobs", "values", "advantages",
    "returns", "policy_mask",
)  # fmt: skip
COUNTS = ("tokens", "positive_tokens", "policy_tokens", "policy_responses")


def models_say(trainer, step):
    """[response] -> logprobs, entropy and values of its tokens, from the models as they are now."""
    found = []
    for item in rollouts(step + 1):
        microbatch = alone(item.rollout.prompt.token_ids, item.rollout.token_ids)
        logprobs, entropy = trainer.actor.compute_logprobs([microbatch])
        critic = trainer.critic
        values = critic and critic.compute_values([microbatch]).tolist()
        found.append({"logprobs": logprobs.tolist(), "entropy": entropy.tolist(), "values": values})
    return found


def as_lists(mini_batch):
    """(its counts, position -> fields of the response)."""
    responses = {}
    for microbatch in mini_batch.microbatches:
        batch = microbatch.batch
        for i, position in enumerate(batch.positions.tolist()):
            one = batch.narrow(i, 1)
            fields = {n: getattr(one, n) for n in PER_TOKEN}
            fields = {n: v if v is None else v.tolist() for n, v in fields.items()}
            fields |= {"tokens": one.tokens.tolist(), "is_correct": one.is_correct.item()}
            responses[position] = fields
    return [float(mini_batch.counts[name]) for name in COUNTS], responses


def files_of(trainer):
    """Role -> name of the directory that its weights are from, told by its embedding."""
    found = {}
    for name in ("hf_path", "critic_hf_path"):
        directory = Path(getattr(trainer.config.model, name))
        with safe_open(directory / "model.safetensors", framework="pt") as file:
            embedding = file.get_tensor("model.embed_tokens.weight")
        for role in trainer.config.algorithm.roles:
            part = getattr(trainer, role)
            (model,) = part.placed.model
            rows = model.state_dict()["embedding.word_embeddings.weight"][: len(embedding)]
            if torch.equal(rows, embedding):
                found[role] = name
    return found


def trained(hf, dumped, run_dir, algorithm, seed, behaviour):
    """Of each step what the models said before it, what updates were given, and its metrics.

    Before them, what the first policy says, and the files that the models are from.
    """
    given = settings(
        hf,
        run_dir,
        seed,
        model={"critic_hf_path": str(hf.parent / "critic")},
        algorithm=algorithm,
        rollout={"behaviour": behaviour},
        parallel={"world_size": dist.get_world_size(), "max_tokens_per_microbatch": 24},
        optimizer={
            "actor_learning_rate": 3e-2, "actor_warmup_updates": 8,
            "critic_learning_rate": 2e-2, "critic_warmup_updates": 4,
        },
    )  # fmt: skip
    with trainer(given, dumped) as made:
        seen, learned = {}, {}

        def watch(role, model):
            update = model.update

            def watched(mini_batches):
                seen[role] = [as_lists(m) for m in mini_batches]
                learned.update(found := update(mini_batches))
                return found

            model.update = watched

        watch("actor", made.actor)
        if made.critic is not None:
            watch("critic", made.critic)
        first = [[r["logprobs"] for r in models_say(made, step)] for step in STEPS]
        files = files_of(made)
        found = []
        for step in STEPS:
            seen.clear()
            learned.clear()
            before = models_say(made, step)
            metrics = made.train_step(step)
            found.append((before, dict(seen), dict(learned), metrics, made.policy_version))
    return first, found, files


def run(workers, tmp, algorithm, seed, behaviour):
    hf = write_tiny_hf(tmp / "hf", **MODEL)
    write_tiny_hf(tmp / "critic", **MODEL, seed=1)
    workers.run(2, dump, tmp / "replay", [step + 1 for step in STEPS], 2)
    return workers.run(2, trained, hf, tmp, tmp / "run", algorithm, seed, behaviour)


@pytest.fixture(scope="module")
def vapo(workers, tmp_path_factory):
    """By rank (the first policy's log-probabilities, each step, each role's files)."""
    return run(workers, tmp_path_factory.mktemp("vapo"), VAPO, 0, "recomputed")


@pytest.fixture(scope="module")
def grpo(workers, tmp_path_factory):
    """The same, without a critic, and with the sampler's log-probabilities as the old ones."""
    return run(workers, tmp_path_factory.mktemp("grpo"), GRPO, 1, "sampler")


def whole(ranks, step, role):
    """[mini-batch] -> (counts, position -> fields) of a step, over both ranks."""
    mini_batches = []
    for (counts, first), (same, second) in zip(
        *(steps[step][1][role] for _, steps, _ in ranks), strict=True
    ):
        assert counts == same and not set(first) & set(second)
        mini_batches.append((counts, {**first, **second}))
    return mini_batches


def before(ranks, step):
    (_, steps, _), _ = ranks
    return steps[step][0]


def gae(rewards, values, lam):
    """Of one response, whose reward stands on its last token."""
    return reference.gae([0.0] * (len(values) - 1) + [rewards], values, [0, len(values)], lam)


def by_hand(ranks, step):
    """[response] -> every field that a VAPO step's updates are given."""
    (first, _, _), _ = ranks
    found = []
    for item, said, frozen in zip(
        rollouts(step + 1), before(ranks, step), first[step], strict=True
    ):
        r, length = item.rollout, len(item.rollout.token_ids)
        mask = [not r.truncated] * length
        values = said["values"]
        of_critic = gae(item.reward, values, LAMBDA_CRITIC)
        found.append(
            {
                "tokens": [*r.prompt.token_ids, *r.token_ids],
                "is_correct": item.status == "correct",
                "loss_mask": mask,
                "rollout_logprobs": list(r.logprobs),
                "old_logprobs": said["logprobs"],
                "reference_logprobs": frozen if step else None,
                "values": values,
                "advantages": gae(item.reward, values, max(0, 1 - 1 / (ALPHA * length))),
                "returns": [a + v for a, v in zip(of_critic, values)],
                "policy_mask": reference.sampler_mask(
                    said["logprobs"], r.logprobs, mask, low=0.5, high=5.0, drops=True
                ),
            }
        )
    flat = trained_on(found, "advantages")
    mean, std = fmean(flat), pstdev(flat)
    for fields in found:
        fields["advantages"] = [(a - mean) / std for a in fields["advantages"]]
    return found


def trained_on(responses, name):
    """The numbers of all tokens that have a loss."""
    return [x for r in responses for x, on in zip(r[name], r["loss_mask"], strict=True) if on]


def test_each_role_begins_with_its_own_weights(vapo, grpo):
    own = {"actor": "hf_path", "critic": "critic_hf_path", "reference": "hf_path"}
    assert [files for *_, files in (*vapo, *grpo)] == [
        own,
        own,
        {"actor": "hf_path"},
        {"actor": "hf_path"},
    ]


@pytest.mark.parametrize("step", STEPS)
def test_updates_are_given_what_the_step_computed(vapo, step):
    expected = by_hand(vapo, step)
    roles = ("critic", "actor") if step else ("critic",)
    assert [set(steps[step][1]) for _, steps, _ in vapo] == [set(roles)] * 2
    for role in roles:
        mini_batches = whole(vapo, step, role)
        assert [len(responses) for _, responses in mini_batches] == [8, 8]
        assert sorted(p for _, some in mini_batches for p in some) == list(range(NUM_RESPONSES))
        for counts, responses in mini_batches:
            for position, fields in responses.items():
                for name, value in fields.items():
                    where = (role, position, name)
                    assert value == pytest.approx(expected[position][name], abs=2e-5), where
            some = [expected[p] for p in responses]
            weights = [r["policy_mask"] for r in some]
            assert counts == [
                sum(sum(r["loss_mask"]) for r in some),
                sum(sum(r["loss_mask"]) for r in some if r["is_correct"]),
                sum(w != 0 for of_response in weights for w in of_response),
                sum(any(of_response) for of_response in weights),
            ]
    # What differs here cannot stand for one another.
    kept = [w > 0 for r in expected for w in r["policy_mask"]]
    on = [w for r in expected for w in r["loss_mask"]]
    assert 0 < sum(kept) < sum(on) and (step == 2 or sum(on) < len(on))
    if step == 2:
        pairs = zip(expected[0]["old_logprobs"], expected[0]["reference_logprobs"], strict=True)
        assert max(abs(a - b) for a, b in pairs) > 1e-2, "the actor has left the reference"


def by_label(scored, expected):
    """What a step's metrics say of each verifier and each source; expected: by_hand's."""
    found = {}
    for kind, names in (("verifier", VERIFIERS), ("source", SOURCES)):
        for name in set(names):
            chosen = [names[s.rollout.prompt.index] == name for s in scored]
            some = list(itertools.compress(scored, chosen))
            own = list(itertools.compress(expected, chosen))
            values, returns = (trained_on(own, column) for column in ("values", "returns"))
            failed = [s.status in ("failed", "timed_out") for s in some]
            of = f"reward/by_{kind}/{name}"
            found |= {
                f"{of}/share": len(some) / NUM_RESPONSES,
                f"{of}/accuracy": fmean(s.status == "correct" for s in some),
                f"{of}/reward_mean": fmean(s.reward for s in some),
                f"{of}/response_length_mean": fmean(len(s.rollout.token_ids) for s in some),
                f"{of}/failed_fraction": fmean(failed),
                f"critic/by_{kind}/{name}/explained_variance": reference.explained_variance(
                    values, returns
                ),
                f"critic/by_{kind}/{name}/value_error_mean": fmean(values) - fmean(returns),
            }
    assert len(found) == 4 * 7
    return found


@pytest.mark.parametrize("step", STEPS)
def test_a_steps_metrics_are_of_that_step(vapo, step):
    """Of all responses, whoever trained on them."""
    scored, expected, said = rollouts(step + 1), by_hand(vapo, step), before(vapo, step)
    lengths = [len(item.rollout.token_ids) for item in scored]
    difference = [
        abs(a - b)
        for item, now in zip(scored, said)
        for a, b in zip(item.rollout.logprobs, now["logprobs"], strict=True)
    ]
    pairs = zip(trained_on(expected, "old_logprobs"), trained_on(expected, "rollout_logprobs"))
    ratios = [math.exp(a - b) for a, b in pairs]
    statuses = [item.status for item in scored]
    by_group: dict[int, list[float]] = {}
    for item in scored:
        by_group.setdefault(item.rollout.position // GROUP_SIZE, []).append(item.reward)
    spreads = [pstdev(rewards) for rewards in by_group.values()]
    found = {
        "num_tokens": sum(lengths),
        "reward/mean": fmean(item.reward for item in scored),
        "reward/std": pstdev(item.reward for item in scored),
        "reward/group_std_mean": fmean(spreads),
        "reward/equal_groups_fraction": spreads.count(0) / len(spreads),
        "reward/correct_fraction": statuses.count("correct") / NUM_RESPONSES,
        "reward/unparsable_fraction": statuses.count("unparsable") / NUM_RESPONSES,
        "reward/timed_out_fraction": statuses.count("timed_out") / NUM_RESPONSES,
        "reward/failed_fraction": statuses.count("failed") / NUM_RESPONSES,
        "rollout/response_length_mean": fmean(lengths),
        "rollout/response_length_max": max(lengths),
        "rollout/truncated_fraction": sum(s.rollout.truncated for s in scored) / NUM_RESPONSES,
        "rollout/logprob_diff_mean": fmean(difference),
        "rollout/logprob_diff_max": max(difference),
        "rollout/sampler_ratio_mean": fmean(ratios),
        "rollout/sampler_corrected_fraction": fmean(not 0.5 <= k <= 5 for k in ratios),
        "actor/entropy": fmean(x for now in said for x in now["entropy"]),
        "algorithm/advantage_mean": 0.0,
        "algorithm/advantage_std": 1.0,
        "algorithm/lambda_actor_mean": fmean(max(0, 1 - 1 / (ALPHA * n)) for n in lengths),
        "critic/explained_variance": reference.explained_variance(
            trained_on(expected, "values"), trained_on(expected, "returns")
        ),
        "critic/value_error_mean": fmean(trained_on(expected, "values"))
        - fmean(trained_on(expected, "returns")),
        "critic/return_std": pstdev(trained_on(expected, "returns")),
        # Of the step's second update; the actor's first step is the critic's second.
        "critic/learning_rate": 2e-2 * min(1, (2 * step + 2) / 4),
        **({"actor/learning_rate": 3e-2 * 2 * step / 8} if step else {}),
    }
    found |= by_label(scored, expected)
    for _, steps, _ in vapo:
        _, given, learned, metrics, version = steps[step]
        assert version == step, "the actor's updates are a new policy, the critic's are not"
        assert {f"{role}/grad_norm" for role in given} <= learned.keys()
        assert metrics == pytest.approx({**learned, **found}, rel=1e-4, abs=2e-5)


@pytest.mark.parametrize("step", STEPS)
def test_groups_are_compared_wherever_they_are_trained_on(grpo, step):
    scored = rollouts(step + 1)
    rewards = [item.reward for item in scored]
    apart = 0
    for _, responses in whole(grpo, step, "actor"):
        for position, fields in responses.items():
            start = position - position % GROUP_SIZE
            group = rewards[start : start + GROUP_SIZE]
            expected = (rewards[position] - fmean(group)) / (stdev(group) + 1e-6)
            length = len(scored[position].rollout.token_ids)
            assert fields["advantages"] == pytest.approx([expected] * length, abs=1e-5), position
            assert fields["old_logprobs"] == list(scored[position].rollout.logprobs)
            assert fields["loss_mask"] == [1] * length, "a stop token and a cut-off one too"
            assert fields["values"] is fields["returns"] is fields["policy_mask"] is None
    for start in range(0, NUM_RESPONSES, GROUP_SIZE):
        held = [
            {p for _, some in steps[step][1]["actor"] for p in some} & set(range(start, start + 4))
            for _, steps, _ in grpo
        ]
        apart += all(held)
    assert apart >= 2, "groups whose members are trained on by both ranks"


def test_every_step_and_seed_has_mini_batches_of_its_own(vapo, grpo):
    partitions = [
        tuple(frozenset(some) for _, some in whole(ranks, step, role))
        for ranks, role in ((vapo, "critic"), (grpo, "actor"))
        for step in STEPS
    ]
    for a, b in itertools.combinations(partitions, 2):
        assert a != b
    # Actor and critic see the same ones.
    for step in STEPS[1:]:
        assert [set(m) for _, m in whole(vapo, step, "actor")] == [
            set(m) for _, m in whole(vapo, step, "critic")
        ]


def refused(hf, dumped, run_dir):
    """What a rank says of a step whose verdicts failed."""
    reward, parallel = {"max_failed_fraction": 0.3}, {"world_size": 2}
    with trainer(settings(hf, run_dir, reward=reward, parallel=parallel), dumped) as made:
        with pytest.raises(UserError) as error:
            made.prepare(0)
        return str(error.value)


def test_a_step_with_too_many_failed_verdicts_is_refused_on_every_rank(workers, tmp_path):
    workers.run(2, dump, tmp_path / "replay", [1], 2)
    hf = write_tiny_hf(tmp_path / "hf", **MODEL)
    statuses = [item.status for item in rollouts(1)]
    assert statuses.count("failed") + statuses.count("timed_out") == 6  # of 16: .375
    told = workers.run(2, refused, hf, tmp_path, tmp_path / "run")
    assert told[0] == told[1] and told[0].startswith("3 verdicts failed and 3 timed out, of 16: ")
