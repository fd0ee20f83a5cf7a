"""Scores what the reward model judges, once everything is sampled and vLLM is gone.

Before: the samples file has the tokens of responses whose verdicts are pending. Every rank holds a
shard of a replica of the reward model, of as many ranks as a vLLM replica had. After: each replica
has scored its share of the problems, and its first rank has appended their lines, with scores in
place of tokens, to its part of the file. An interrupted pass goes on with what is pending.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vapo_megatron.cli.checks.weights import check_reward_model
from vapo_megatron.cli.command import ProgressBar
from vapo_megatron.cli.sampling.inputs import Evaluation
from vapo_megatron.config import RewardConfig, VapoConfig
from vapo_megatron.config.missing import missing_model
from vapo_megatron.data.batch import RolloutBatch, bounds
from vapo_megatron.data.microbatch import make_microbatch
from vapo_megatron.data.rollout import PENDING
from vapo_megatron.data.storage import append
from vapo_megatron.errors import ConfigError
from vapo_megatron.models.hf_config import read_reward_shape
from vapo_megatron.parallel.reduce import gather_objects, sum_over_world
from vapo_megatron.reward.checks import FAILED, check_failures, place
from vapo_megatron.reward.reward_model import reward_model_verdict
from vapo_megatron.reward.shaping import scored_verdict
from vapo_megatron.rollout.evaluation.samples_file import begin_parts, collect, part_of

_BATCH = 8
"""Forward passes whose problems are scored together and then written."""

Line = dict[str, Any]
"""A problem's line in the samples file."""
Score = Callable[[Sequence[Sequence[int]]], list[float]]
"""Sequences of token ids to the reward model's scores at their last tokens."""


def is_judged(line: Mapping[str, Any]) -> bool:
    """Return whether no response of a problem is pending."""
    return all(response["status"] != PENDING for response in line["responses"])


def layout(config: VapoConfig, hf_path: Path) -> VapoConfig:
    """Return the configuration of the reward model's pass: a replica has a vLLM replica's ranks."""
    tp_size = config.rollout.tensor_model_parallel_size
    sizes = {"tensor_model_parallel_size": tp_size, "context_parallel_size": 1}
    parallel = config.parallel.model_copy(update=sizes)
    model = config.model.model_copy(update={"hf_path": str(hf_path)})
    return config.model_copy(update={"parallel": parallel, "model": model})


def check(evaluation: Evaluation, config: VapoConfig) -> None:
    """Refuse a reward model that cannot score the responses, or that judges no row.

    Raises:
        UserError: names model.reward_hf_path.
    """
    path = config.model.reward_hf_path
    if path is not None and not Path(path).is_dir():
        raise ConfigError(missing_model("model.reward_hf_path", path))
    inputs = evaluation.inputs._replace(dataset=evaluation.dataset)
    check_reward_model(layout(config, evaluation.hf_path), inputs)


def score_pending(evaluation: Evaluation, config: VapoConfig, samples: Path) -> None:
    """Give every pending response its verdict. Collective; rank 0 holds the file's lock.

    Args:
        evaluation: what was sampled.
        config: of the sampling.
        samples: the complete file, on a file system that all nodes share.

    Raises:
        VerdictsFailed: more of a batch's scores are not finite than reward.max_failed_fraction
            allows.
    """
    if config.model.reward_hf_path is None:
        return
    tp_size = config.rollout.tensor_model_parallel_size
    pending: list[int] = []
    if dist.get_rank() == 0:
        judged = collect(samples, evaluation.header, is_judged)
        pending = [index for index, is_done in judged.items() if not is_done]
        if pending:
            begin_parts(samples, evaluation.header, dist.get_world_size() // tp_size)
    pending = gather_objects(pending)[0]
    if not pending:
        return
    # Loads megatron-core, which nothing else needs here.
    from vapo_megatron.parallel import groups
    from vapo_megatron.parallel.minibatches import packed_multiple
    from vapo_megatron.roles.reward_model import RewardModel

    config = layout(config, evaluation.hf_path)
    shape = read_reward_shape(config.model, evaluation.inputs.shape)
    ranks = groups.initialize(config.parallel, config.seed)
    try:
        model = RewardModel(shape, config, ranks)
        multiple = packed_multiple(config.parallel, config.model.fp8)

        def score(sequences: Sequence[Sequence[int]]) -> list[float]:
            size = config.parallel.max_tokens_per_microbatch
            packed = [make_microbatch(b, multiple_of=multiple) for b in _packed(sequences, size)]
            return model.compute_scores(packed).tolist()

        share = set(pending[ranks.dp_rank :: ranks.dp_size])
        part = part_of(samples, ranks.dp_rank)
        with part.open("ab") as file, ProgressBar("prompts scored") as bar:
            written = 0
            for lines in _batches(_lines(samples, share), evaluation, config):
                _judge(lines, evaluation, config.reward, score)
                # Every tensor-parallel rank computes the scores; one writes them.
                if ranks.tp_rank == 0:
                    append(file, lines)
                written += len(lines)
                bar.show(round(written / len(share) * len(pending)), len(pending))
        total = int(sum_over_world(torch.tensor(float(written), dtype=torch.float64))) // tp_size
        assert total == len(pending), f"{total} of {len(pending)} prompts were scored"
        if ranks.rank == 0:
            # The lines with scores take the place of those without.
            collect(samples, evaluation.header)
    finally:
        groups.destroy()


def _lines(samples: Path, wanted: set[int]) -> Iterator[Line]:
    with samples.open("rb") as file:
        next(file)
        for text in file:
            line = json.loads(text)
            if line["prompt_index"] in wanted:
                yield line


def _batches(
    lines: Iterable[Line], evaluation: Evaluation, config: VapoConfig
) -> Iterator[list[Line]]:
    """Yield problems for about _BATCH forward passes at a time."""
    batch: list[Line] = []
    num_tokens = 0
    for line in lines:
        batch.append(line)
        num_tokens += sum(map(len, _sequences(line, evaluation)))
        if num_tokens >= _BATCH * config.parallel.max_tokens_per_microbatch:
            yield batch
            batch, num_tokens = [], 0
    if batch:
        yield batch


def _sequences(line: Line, evaluation: Evaluation) -> list[list[int]]:
    """Return prompt and response of each pending response, as token ids."""
    prompt = evaluation.dataset.tokens(line["prompt_index"])
    pending = [r for r in line["responses"] if r["status"] == PENDING]
    return [r["sequence"] if "sequence" in r else [*prompt, *r["token_ids"]] for r in pending]


def _judge(
    lines: Sequence[Line], evaluation: Evaluation, reward: RewardConfig, score: Score
) -> None:
    """Replace the pending responses' tokens by their verdicts, in place."""
    found = iter(score([ids for line in lines for ids in _sequences(line, evaluation)]))
    statuses, first = Counter[str](), ""
    for line in lines:
        for response in line["responses"]:
            if response["status"] == PENDING:
                verdict = reward_model_verdict(next(found))
                verdict = scored_verdict(verdict, reward, line["verifier"])
                response |= {"status": verdict.status, "score": verdict.score}
                del response["sequence" if "sequence" in response else "token_ids"]
                statuses[verdict.status] += 1
                if verdict.status in FAILED and not first:
                    row = place(evaluation.dataset, line["prompt_index"])
                    first = f"the verifier {line['verifier']} on {row}: {verdict.note}"
    check_failures(statuses, reward, first)


def _packed(sequences: Sequence[Sequence[int]], max_tokens: int) -> list[RolloutBatch]:
    """Pack sequences in their order, each batch up to max_tokens or of one sequence."""
    batches: list[list[Sequence[int]]] = []
    room = 0
    for ids in sequences:
        if not batches or len(ids) > room:
            batches.append([])
            room = max_tokens
        batches[-1].append(ids)
        room -= len(ids)
    return [_batch(batch) for batch in batches]


def _batch(sequences: Sequence[Sequence[int]]) -> RolloutBatch:
    """Return sequences as prompts without responses."""
    count = len(sequences)
    lengths = torch.tensor([len(ids) for ids in sequences])
    nothing = torch.empty(0)
    return RolloutBatch(
        tokens=torch.tensor([token for ids in sequences for token in ids]),
        sequence_cu_seqlens=bounds(lengths),
        cu_seqlens=bounds(torch.zeros_like(lengths)),
        positions=torch.arange(count),
        rewards=torch.zeros(count),
        is_correct=torch.zeros(count, dtype=torch.bool),
        truncated=torch.zeros(count, dtype=torch.bool),
        rollout_logprobs=nothing,
        loss_mask=nothing.bool(),
    )
