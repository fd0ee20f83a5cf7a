"""Real vLLM engines in pairs of gloo processes, against transformers in float32 on a tiny Qwen2.

Two processes build every engine in turn (imports and constructors take most of the time), and the
tests judge what came back.

Does not exercise: GPUs (where sleep gives memory back; here it is spoilt, see
poisoned_sleep.py), CUDA graphs, bfloat16, the Triton sampler, more than two ranks, other layouts of
Megatron as the source of the weights (tests/weights).
"""

import contextlib
import dataclasses
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

from tests.rollout.vllm import engine_jobs as jobs
from tests.rollout.vllm.interface_jobs import without_names
from tests.rollout.vllm.sleep_jobs import LONGER_THAN_A_BLOCK
from tests.weights.tiny_hf import EOS, write_tiny_model
from tests.workers import WorkerPool
from vapo_megatron.planning.host_memory import VLLM_HOST_TOKEN_BYTES
from vapo_megatron.rollout.vllm.interface import SUPPORTED

TINY = {"num_layers": 2, "heads": 2, "kv_heads": 2, "vocab": 64}
PARTS = ("constructor", "generate")


def make_models(directory, **of_each):
    """name -> a model with a tokenizer; of_each: what it has beside TINY."""
    return {
        name: write_tiny_model(directory / name, **TINY, **more) for name, more in of_each.items()
    }


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Three directories: two models for TP=1, and a tied one for TP=2."""
    of_each = {"first": {}, "second": {"seed": 1}, "tied": {"tied": True}}
    return make_models(tmp_path_factory.mktemp("models"), **of_each)


@pytest.fixture(scope="module")
def found(vllm_workers, models, tmp_path_factory):
    """What two TP=1 replicas did, by rank."""
    tmp = tmp_path_factory.mktemp("run")
    return vllm_workers.run(
        2, jobs.two_replicas, tmp, models["first"], models["second"], timeout_seconds=280
    )


@pytest.fixture(scope="module")
def found_tp2(vllm_workers, models, found, tmp_path_factory):
    """What one TP=2 replica did in the same processes afterwards, by rank."""
    tmp = tmp_path_factory.mktemp("run")
    return vllm_workers.run(2, jobs.one_replica, tmp, models["tied"], timeout_seconds=280)


@pytest.fixture(scope="module")
def reference(models):
    """name -> transformers' model, float32."""
    return {name: Qwen2ForCausalLM.from_pretrained(path).eval() for name, path in models.items()}


def test_what_vllm_gives_up_is_left_out(vllm_workers, tmp_path):
    """What is empty or not finite is not: the trainer knows what to do with it."""
    ((rollouts, finished),) = vllm_workers.run(1, jobs.odd_completions, tmp_path)
    assert finished == [5, 4, 1, 0], "each is told of when it ends"
    assert [(r.position, r.sample, tuple(r.token_ids), r.truncated) for r in rollouts] == [
        (0, 0, (4, 2), False), (1, 1, (4, 5), True), (4, 0, (), True), (5, 1, (2,), False),
    ]  # fmt: skip
    assert len(rollouts[2].logprobs) == 0 and math.isnan(rollouts[3].logprobs[0])


def test_what_an_installed_vllm_lacks_is_a_config_error(vllm_workers, tmp_path):
    ((complete, said),) = vllm_workers.run(1, without_names, tmp_path)
    assert complete == "no error"
    for lacking, message in said.items():
        assert message.startswith("ConfigError: the installed vLLM, 0.") and "\n" not in message
        assert (
            f" has no {lacking}, which this package uses; supported is vLLM {SUPPORTED}" in message
        )
    assert len(said) == 7


def position(rollout):
    return rollout.position


def both(found, key):
    """A call's rollouts over all replicas, by position."""
    return sorted((r for rank in found for r in rank[key]), key=position)


@torch.no_grad()
def logits_of(model, rollout):
    """float32 [response length, V]: what transformers predicts at each response token."""
    ids = torch.tensor([[*rollout.prompt.token_ids, *rollout.token_ids]])
    return model(ids).logits[0, len(rollout.prompt.token_ids) - 1 : -1]


def assert_greedy(model, rollouts):
    for rollout in rollouts:
        logits = logits_of(model, rollout)
        assert logits.argmax(-1).tolist() == list(rollout.token_ids)
        expected = logits.log_softmax(-1).max(-1).values
        torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, atol=1e-4, rtol=0)


def test_the_layout(found):
    assert [f["facts"] for f in found] == [(0, 2, (EOS,)), (1, 2, (EOS,))]


def test_each_replica_samples_its_own_share(found):
    assert [r.position for r in found[0]["sampled"]] == list(range(18))
    assert [r.position for r in found[1]["sampled"]] == list(range(18, 36))
    ask = jobs.prompts(12, group_size=3)
    for r in both(found, "sampled"):
        assert r.prompt == ask[r.position]
        assert r.sample == r.position % 3
        assert r.policy_version == 3
    assert [len(f["fewer than replicas"]) for f in found] == [1, 0]


def test_greedy_is_transformers_greedy(found, reference):
    rollouts = both(found, "greedy")
    assert len(rollouts) == 12
    assert_greedy(reference["first"], rollouts)


def test_logprobs_are_transformers(found, reference):
    for rollout in both(found, "sampled"):
        assert_logprobs(rollout, reference["first"])


def assert_logprobs(rollout, model, first=0, last=None):
    """Those of tokens [first, last) are what the model gives for the text before each."""
    expected = logits_of(model, rollout).log_softmax(-1)
    expected = expected[torch.arange(len(expected)), list(rollout.token_ids)]
    given = torch.tensor(rollout.logprobs)
    torch.testing.assert_close(given[first:last], expected[first:last], atol=1e-4, rtol=0)


def _filtered(logits, temperature, top_p, top_k):
    """log-probabilities [V] after temperature, then top-k, then top-p, written out."""
    logits = logits / temperature
    order = logits.argsort(descending=True)
    kept = order[:top_k]
    mass = torch.zeros(())
    nucleus = []
    for i, p in zip(kept.tolist(), logits[kept].softmax(-1)):
        if mass >= top_p:
            break
        nucleus.append(i)
        mass = mass + p
    out = torch.full_like(logits, -math.inf)
    out[nucleus] = logits[nucleus].log_softmax(-1)
    return out


def test_logprobs_are_those_of_the_filtered_distribution(found, reference):
    rollouts = both(found, "filtered")
    for rollout in rollouts[::4]:
        for logits, token, logprob in zip(
            logits_of(reference["first"], rollout), rollout.token_ids, rollout.logprobs
        ):
            assert abs(_filtered(logits, 0.7, 0.8, 12)[token].item() - logprob) < 1e-4


def test_first_tokens_follow_the_models_distribution(found, reference):
    counts = torch.zeros(64, dtype=torch.float64)
    for rank in found:
        counts += torch.bincount(torch.tensor(rank["first tokens"]), minlength=64)
    prompt = torch.tensor([jobs.prompts(1)[0].token_ids])
    with torch.no_grad():
        expected = 4000 * reference["first"](prompt).logits[0, -1].double().softmax(-1)
    often = expected > 5
    observed = torch.cat([counts[often], counts[~often].sum()[None]])
    expected = torch.cat([expected[often], expected[~often].sum()[None]])
    chi_square = ((observed - expected) ** 2 / expected).sum().item()
    degrees = len(expected) - 1
    assert degrees > 20
    # The mean of chi square is its degrees of freedom, its variance twice that: 4 deviations.
    assert abs(chi_square - degrees) < 4 * math.sqrt(2 * degrees)


def test_a_request_samples_the_same_tokens_whatever_its_batch_and_replica(found):
    here = {(r.prompt.index, r.sample): (r.token_ids, rank) for rank, f in enumerate(found)
            for r in f["sampled"]}  # fmt: skip
    moved = 0
    for rank, f in enumerate(found):
        for r in f["elsewhere"]:
            tokens, before = here[r.prompt.index, r.sample]
            assert r.token_ids == tokens
            moved += rank != before
    assert moved == 9


def check_same_tokens(rollouts, expected):
    """The same but for log-probabilities, which depend on the batch in their last digits."""
    largest = 0.0
    for one, other in zip(rollouts, expected, strict=True):
        assert dataclasses.replace(one, logprobs=other.logprobs) == other
        differences = torch.tensor(one.logprobs) - torch.tensor(other.logprobs)
        largest = max(largest, float(differences.abs().max()))
    assert largest < 1e-5, largest
    print(f"log-probabilities differ by at most {largest:.1e}")


def test_a_replica_that_stands_still_holds_up_only_what_it_began_with(found):
    (taken, counts), (late, _) = (f["shared"] for f in found)
    assert [r.position for r in late] == list(range(18, 24))
    assert [r.position for r in taken] == [*range(18), *range(24, 36)]
    check_same_tokens(sorted(taken + late, key=lambda r: r.position), both(found, "sampled"))
    # First its equal share is expected, then as many as it has begun.
    assert counts[0][1] == 18 and counts[-1] == (30, 30)


def test_the_ranks_of_a_replica_take_from_a_list_together(found_tp2):
    check_same_tokens(found_tp2[0]["shared"], found_tp2[0]["sampled"])
    assert found_tp2[1]["shared"] == []


def test_samples_steps_and_roles_differ(found):
    sampled = both(found, "sampled")
    assert len({(r.prompt.index, *r.token_ids) for r in sampled}) == len(sampled)
    for other in ("next step", "evaluation"):
        same = sum(a.token_ids == b.token_ids for a, b in zip(sampled, both(found, other)))
        assert same <= 2  # A response that stops at its first token may come twice.


def test_a_stop_token_belongs_to_its_response(found):
    stopped = [r for r in both(found, "sampled") if not r.truncated]
    truncated = [r for r in both(found, "sampled") if r.truncated]
    assert len(stopped) > 3 and len(truncated) > 3
    for r in stopped:
        assert r.token_ids[-1] == EOS and EOS not in r.token_ids[:-1]
        assert len(r.logprobs) == len(r.token_ids) <= jobs.MAX_RESPONSE
    for r in truncated:
        assert EOS not in r.token_ids
        assert len(r.logprobs) == len(r.token_ids) == jobs.MAX_RESPONSE


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stop_token_at_the_limit_is_no_truncation(found, rank):
    limits = found[rank]["limits"]
    stopped, exact, less = limits["stopped"], limits["exact"], limits["one less"]
    assert exact.token_ids == stopped.token_ids and not exact.truncated
    assert less.token_ids == stopped.token_ids[:-1] and less.truncated


@pytest.mark.parametrize("rank", [0, 1])
def test_progress_ends_at_all(found, rank):
    calls = found[rank]["progress"]
    done = [d for d, *_ in calls]
    assert done == sorted(set(done)) and len(done) > 1
    assert calls[-1][:2] == (18, 18) and {total for _, total, *_ in calls} == {18}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_response_is_told_of_and_let_go_before_vllm_goes_on(found, rank):
    before = 0
    for done, _, told, alive in found[rank]["progress"]:
        assert told == done
        assert alive == done - before, "those that have just ended"
        before = done


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("rank", [0, 1])
def test_the_trainers_state_is_left_alone(found, part, rank):
    before, after = found[rank][part]
    assert before == after


def test_weights_must_be_complete_and_asked_for_by_version(found):
    for f in found:
        errors = f["errors"]
        expected = {
            "before loading": "asked for policy version 0, but the engine holds None",
            "missing": "1 of the engine's weights were not given: "
            "model.layers.1.self_attn.v_proj.weight",
            "after a failed load": "asked for policy version 0, but the engine holds None",
            "twice": "was given to the engine twice",
            "unknown": "no module or parameter named 'other'",
            "other version": "asked for policy version 4, but the engine holds 3",
            "over the limit": f"exceeds the limit {jobs.MAX_RESPONSE}",
        }
        assert errors.keys() == expected.keys()
        for name, text in expected.items():
            assert text in errors[name], name


def test_nothing_of_older_weights_is_reused(found, reference):
    first, second = both(found, "long"), both(found, "long, second weights")
    assert {len(r.prompt.token_ids) for r in second} == {jobs.MAX_PROMPT}
    assert_greedy(reference["first"], first)
    assert_greedy(reference["second"], second)
    assert {r.policy_version for r in second} == {4}


def test_a_sleeping_engine_wakes_weights_then_cache(found, reference):
    slept = [f["sleep"] for f in found]
    for f in slept:
        assert f["events"][: len(f["once"])] == f["once"]
        *before, version_6, version_7 = " ".join(f["once"]).split(" load ")
        # Falling asleep empties the prefix cache as every pause does.
        assert before == ["reset sleep 2 wake ['weights']"]
        assert version_6 == "reset wake ['kv_cache'] reset" and version_7 == "reset"
        assert "asked for policy version 5, but the engine holds None" in f["asleep"]
        assert f["lost"] and all(f["lost"])
        assert f["paused"] and f["between"] == ["kv_cache"] and f["running"]
        assert f["half awake, then asleep"] == ["kv_cache", "weights"]
    assert_greedy(reference["first"], sorted(sum((f["awake"] for f in slept), []), key=position))


def test_both_ranks_of_a_replica_sleep(found_tp2):
    for f in found_tp2:
        assert f["woken"] == [dataclasses.replace(r, policy_version=1) for r in f["greedy"]]


def test_what_sleep_lost_is_synced_and_sampled_alike(found_tp2):
    """Tokens and log-probabilities, also of prompts whose beginnings were in the prefix cache."""
    for f in found_tp2:
        before, *after = f["synced"]
        assert max(len(r.prompt.token_ids) for r in before) == LONGER_THAN_A_BLOCK
        assert len({tuple(r.token_ids) for r in before}) == 8
        for version, again in zip((10, 11), after, strict=True):
            assert again == [dataclasses.replace(r, policy_version=version) for r in before]


def test_no_network_and_no_compiler(found, found_tp2):
    assert [f["network"] for f in found] == [[], []]
    # Ranks of a tensor-parallel replica look up their own rows of the embedding.
    assert [f["compiled"] for f in (*found, *found_tp2)] == [0] * 4


def test_the_trainers_groups_survive_shutdown(found):
    # (1 + 2) summed again over two ranks.
    assert [f["trainer's groups after shutdown"] for f in found] == [6, 6]


def test_tensor_parallel_ranks_sample_the_same_and_one_keeps_it(found_tp2):
    one, two = found_tp2
    assert (one["kept"], two["kept"]) == (64, 0)
    assert one["facts"] == two["facts"] == (0, 1, (7, 9))
    for key in ("sampled", "greedy"):
        assert [(r.position, r.token_ids) for r in one[key]] == [
            (r.position, r.token_ids) for r in two[key]
        ]
    assert [r.position for r in one["sampled"]] == list(range(64))
    for f in found_tp2:
        assert "model.layers.0.mlp.up_proj.weight" in f["missing"]
        assert f["shared memory"] == []


def test_the_ranks_of_a_replica_stop_together(found_tp2):
    assert [f["stopped"] for f in found_tp2] == [("Stopped: ", 3), ("Stopped: ", 3)]


def test_tensor_parallel_is_transformers(found_tp2, reference):
    assert_greedy(reference["tied"], found_tp2[0]["greedy"])
    for rollout in found_tp2[0]["sampled"]:
        assert_logprobs(rollout, reference["tied"])


def test_configured_stop_tokens_are_the_only_ones(found_tp2):
    rollouts = found_tp2[0]["sampled"]
    assert {r.token_ids[-1] for r in rollouts if not r.truncated} == {7, 9}
    assert any(EOS in r.token_ids[:-1] for r in rollouts)


@pytest.mark.slow
def test_preempted_responses_are_sampled_alike(vllm_workers, models, found_tp2, tmp_path):
    for preemptions, *both in vllm_workers.run(2, jobs.preempting, tmp_path, models["first"]):
        assert preemptions > 0
        sampled, expected = ([(r.position, r.token_ids) for r in each] for each in both)
        assert len(sampled) == 15 and sampled == expected


@pytest.mark.slow
def test_host_bytes_of_a_token_are_those_of_the_plan(vllm_workers, found_tp2, tmp_path):
    """With a dict for each token it would be 370. A finished response is two arrays, 8 bytes a
    token, and some hundred bytes; vLLM's lists of the last one are there until the next one."""
    write_tiny_model(tmp_path / "hf", **{**TINY, "vocab": 2000})
    found = vllm_workers.run(2, jobs.host_bytes, tmp_path, tmp_path / "hf", timeout_seconds=280)
    for running, finished in found:
        # Lists grow by an eighth at a time: the plan has more than there is on average.
        assert 0.9 * VLLM_HOST_TOKEN_BYTES < running < VLLM_HOST_TOKEN_BYTES
        assert 8 <= finished < 8 + VLLM_HOST_TOKEN_BYTES / 16


FAMILIES = {
    # Other than hidden / heads = 32, which Qwen2 in vLLM would take whatever config.json says.
    "qwen3": {"family": "qwen3", "head_dim": 64},
    "llama": {"family": "llama", "head_dim": 64, "tied": True},
    "qwen3_moe": {"family": "qwen3_moe", "head_dim": 64},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_are_transformers(vllm_workers, found_tp2, tmp_path, family):
    """Exported by Megatron and read by vLLM's own loader; then another model's weights, synced."""
    of_family = FAMILIES[family]
    paths = make_models(tmp_path, first=of_family, second={**of_family, "seed": 1})
    found = vllm_workers.run(2, jobs.of_family, tmp_path, *paths.values())
    for name, path in paths.items():
        assert_greedy(AutoModelForCausalLM.from_pretrained(path).eval(), found[0][name])
    assert [r.token_ids for r in found[0]["first"]] != [r.token_ids for r in found[0]["second"]]


HAS_AVX512 = "avx512f" in Path("/proc/cpuinfo").read_text().split()


@pytest.mark.skipif(not HAS_AVX512, reason="vLLM has no such cache on this CPU")
def test_keys_and_values_of_8_bits(vllm_workers, models, found_tp2, tmp_path):
    """Half of the bytes, after a sleep too; log-probabilities move, by what 3 bits round."""
    for found in vllm_workers.run(2, jobs.with_fp8_cache, tmp_path, models["first"]):
        wide, narrow = found["auto"], found["fp8"]
        assert wide["bytes"] / wide["blocks"] == 2 * narrow["bytes"] / narrow["blocks"]
        pairs = list(zip(wide["rollouts"], narrow["rollouts"], strict=True))
        # The first token's, which both predict from the same prompt.
        moved = [abs(a.logprobs[0] - b.logprobs[0]) for a, b in pairs]
        assert 0 < max(moved) < 0.2


@pytest.mark.skipif(HAS_AVX512, reason="vLLM has such a cache on this CPU")
def test_keys_and_values_of_8_bits_need_avx_512(models, found_tp2, tmp_path):
    """A process whose engine did not start keeps vLLM's groups: these are for this test alone."""
    overrides = "model.dtype=bfloat16", "rollout.kv_cache_dtype=fp8"
    with contextlib.closing(WorkerPool()) as pool:
        errors = pool.run(2, jobs.refused, tmp_path, models["first"], *overrides)
    for error in errors:
        assert error.startswith("ConfigError: ") and "FP8 KV cache on CPU requires" in error


def test_what_vllm_refuses_is_a_config_error(vllm_workers, models, found_tp2, tmp_path):
    path = write_tiny_model(tmp_path / "heads", **{**TINY, "heads": 4, "kv_heads": 4})
    for error in vllm_workers.run(2, jobs.refused, tmp_path, path):
        assert error.startswith("ConfigError: ") and "must be one of 32, 64, " in error
    path = write_tiny_model(tmp_path / "wider", **TINY, head_dim=64)
    for error in vllm_workers.run(2, jobs.refused, tmp_path, path):
        assert "head_dim=64 must be hidden_size / num_attention_heads = 32" in error
    too_small = "rollout.kv_cache_bytes=1000"
    for error in vllm_workers.run(2, jobs.refused, tmp_path, models["first"], too_small):
        assert error.startswith("ConfigError: ") and str(models["first"]) in error
        assert "cache" in error
