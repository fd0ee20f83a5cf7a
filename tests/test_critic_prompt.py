"""A critic with prompts of its own: its values and its loss are of them, all else is as without.

Trainers on two data-parallel ranks train on dumped responses, some of whose prompts the critic is
given in another form; what it computes is compared with each response alone behind that prompt.
How the prompts get there is in tests/rollout/test_inputs.py, test_replay.py and
tests/parallel/test_exchange.py. Not exercised: the sampler, which only ever sees the other prompts.
"""

import pytest

from tests import cut, reference
from tests.dumped import MODEL, NUM_RESPONSES, write
from tests.rollout.test_replay import OWN, with_own_prompts
from tests.weights.tiny_hf import write_tiny_hf
from tests.whole_run import settings, trainer


def alone(trainer, prompts):
    """position -> (values, log-probabilities) of each response in a forward pass of its own."""
    found = {}
    for item in with_own_prompts(1):
        prompt = item.rollout.prompt
        ids = prompts.get(prompt.index, prompt.token_ids)
        micro = [cut.alone(ids, item.rollout.token_ids)]
        values = trainer.critic.compute_values(micro).tolist()
        found[item.rollout.position] = values, trainer.actor.compute_logprobs(micro)[0].tolist()
    return found


def prepared(hf, dumped, run_dir, value_range):
    """What this rank computes of its step, and what each response alone gives; a worker's."""
    given_settings = settings(
        hf,
        run_dir,
        parallel={"world_size": 2, "max_tokens_per_microbatch": 36, "offload": False},
        algorithm={"value_range": value_range},
        rollout={"max_prompt_tokens": 6},
    )
    with trainer(given_settings, dumped, of="StepTrainer") as made:
        kept, given, prepare = [], {}, made.prepare
        made.prepare = lambda step: kept.append(prepare(step)) or kept[0]
        for role in ("actor", "critic"):
            getattr(made, role).update = lambda parts, role=role: (
                given.setdefault(role, list(parts)) and {}
            )
        made.train_step(0)
        batch, losses, tokens = kept[0].batch, [], []
        for mini_batch in given["critic"]:
            losses.append(float(made.critic.compute_gradients(mini_batch)["loss"]))
            tokens += [int(m.model_cu_seqlens[-1]) for m in mini_batch.microbatches]
        fields = {
            int(p): [getattr(batch.narrow(i, 1), name).tolist()
                     for name in ("values", "old_logprobs", "returns")]
            for i, p in enumerate(batch.positions)
        }  # fmt: skip
        places = [
            [p for m in mini_batch.microbatches for p in m.batch.positions.tolist()]
            for mini_batch in given["actor"]
        ]
        same = places == [
            [p for m in mini_batch.microbatches for p in m.batch.positions.tolist()]
            for mini_batch in given["critic"]
        ]
        return fields, losses, places, same, tokens, alone(made, OWN), alone(made, {})


@pytest.mark.parametrize("value_range", [None, [-3.0, 3.0]])
def test_values_and_loss_are_of_the_critics_prompts(workers, tmp_path, value_range):
    hf = write_tiny_hf(tmp_path / "hf", **MODEL)
    workers.run(1, write, tmp_path / "replay", with_own_prompts(1))
    results = workers.run(2, prepared, hf, tmp_path, tmp_path / "run", value_range)
    fields = {p: found for result in results for p, found in result[0].items()}
    assert sorted(fields) == list(range(NUM_RESPONSES))
    own, plain = results[0][-2:]
    apart = 0.0
    for position, (values, logprobs, _) in fields.items():
        assert values == pytest.approx(own[position][0], abs=1e-5)
        assert logprobs == pytest.approx(plain[position][1], abs=1e-5)
        apart = max(apart, *(abs(a - b) for a, b in zip(values, plain[position][0])))
    assert apart > 1e-3, "the two prompts' values could not be told apart"
    # The critic's loss of each mini-batch, over both ranks' responses.
    for step, loss in enumerate(results[0][1]):
        members = [p for result in results for p in result[2][step]]
        values = [v for p in members for v in own[p][0]]
        returns = [r for p in members for r in fields[p][2]]
        weights = [1.0] * len(values)
        expected, _ = reference.value_loss(values, returns, weights, count=len(values))
        assert loss == pytest.approx(expected, abs=1e-5)
    for _, losses, places, same, tokens, *_ in results:
        assert len(losses) == 2 and same
        assert max(tokens) <= 36, "the budget holds for the longer prompts"
        assert [len(some) for some in places] == [4, 4]
