"""Print a few responses of a checkpoint, to a prompt of your own or to problems of a file.

  vapo sample --checkpoint RUN --prompt "What is 6 times 7?" --samples 3
  vapo sample --checkpoint models/Qwen2.5-0.5B --data problems.jsonl --problems 2 --temperature 0

The checkpoint is a Hugging Face directory, or a run directory, which brings its hf_export and its
configuration. A prompt becomes a user's message where the tokenizer has a chat template; --plain
gives it as it is. An environment plays its episodes, turn by turn, with the verdicts that it gives.
Nothing else is judged: vapo evaluate does that.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vapo_megatron.cli.command import Parser, under_torchrun
from vapo_megatron.cli.sampling import options as shared
from vapo_megatron.errors import ConfigError

if TYPE_CHECKING:
    from vapo_megatron.cli.sampling.inputs import Evaluation
    from vapo_megatron.config import VapoConfig
    from vapo_megatron.data.rollout import Episode, Prompt, Rollout


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0; 2 for a user's mistake; 130 when interrupted."""
    return shared.main_of("sample", _parser(), _sample, argv, interrupted="nothing was kept")


def _sample(options: argparse.Namespace, worker: Sequence[str]) -> str | None:
    if (options.prompt is None) == (options.data is None) or options.prompt == "":
        raise ConfigError("give --prompt TEXT, or --data FILE")
    # Loads torch, so it comes after the options are checked.
    from vapo_megatron.cli.sampling import inputs
    from vapo_megatron.rollout.tokenizer import decode_responses

    columns = ["data.prompt_column=prompt"] if options.prompt is not None else []
    columns += ["data.answer_column=null"] if options.prompt is not None else []
    config = inputs.evaluation_config(
        options.checkpoint, shared.sampling_overrides(options) + columns, shared.num_processes(None)
    )
    with tempfile.TemporaryDirectory() as directory:
        data = options.data
        if data is None:
            data = Path(directory, "prompt.jsonl")
            data.write_text(_row(options.prompt, options.checkpoint, is_plain=options.plain))
        evaluation = inputs.check(options.checkpoint, data, config)
    if config.parallel.world_size > 1 and not under_torchrun():
        shared.become_torchrun(config.parallel.world_size, worker)
    config = config.model_copy(update={"rollout": evaluation.rollout})
    prompts = evaluation.dataset.problems[: options.problems]
    rollouts = _rollouts(evaluation, config, prompts)
    tokenizer = evaluation.inputs.tokenizer
    texts = decode_responses(tokenizer, [r.token_ids for r in rollouts])
    decode = functools.partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    return "\n".join(_lines(rollouts, texts, decode)) if rollouts else None


def _row(prompt: str, checkpoint: Path, *, is_plain: bool) -> str:
    """Return a data file's row: a chat message where the tokenizer has a template."""
    from vapo_megatron.cli.sampling.directory import find_hf_directory
    from vapo_megatron.rollout.tokenizer import load_tokenizer

    is_chat = not is_plain and load_tokenizer(find_hf_directory(checkpoint)).chat_template
    value = [{"role": "user", "content": prompt}] if is_chat else prompt
    return json.dumps({"prompt": value}) + "\n"


def _rollouts(
    evaluation: Evaluation, config: VapoConfig, prompts: Sequence[Prompt]
) -> list[Rollout]:
    """Sample in order; on the first rank, none elsewhere. Collective."""
    import torch.distributed as dist

    from vapo_megatron.algorithm.group_sampling import repeat_for_group
    from vapo_megatron.cli.sampling.engine import VERSION, build_engine, distributed
    from vapo_megatron.rollout.episodes import start_episodes
    from vapo_megatron.rollout.evaluation.judging import sampling_settings
    from vapo_megatron.rollout.work import generate

    samples = config.evaluation.samples
    settings = sampling_settings(config.evaluation, config.rollout.max_response_tokens)
    with distributed(config) as stack:
        # All processes hold one replica.
        episodes = start_episodes(
            config.environment, config.rollout, config.reward, evaluation.inputs,
            has_players=dist.get_rank() == 0,
        )  # fmt: skip
        if episodes is not None:
            stack.callback(episodes.close)
        engine = build_engine(evaluation, config)
        stack.callback(engine.shutdown)
        asked = repeat_for_group(list(prompts), samples)
        sizes = [samples] * len(prompts)
        return generate(engine, asked, sizes, 0, settings, VERSION, episodes=episodes)


def _lines(
    rollouts: Iterable[Rollout], texts: Iterable[str], decode: Callable[[Sequence[int]], str]
) -> Iterator[str]:
    """Yield each prompt once, and its responses.

    decode: ids to text, with special tokens; of an episode, where they tell who speaks.
    """
    for rollout, text in zip(rollouts, texts, strict=True):
        if rollout.sample == 0:
            answer = rollout.prompt.answer
            yield f"=== prompt{f' (answer: {answer})' if answer else ''}\n{rollout.prompt.text}"
        sample = f"--- sample {rollout.sample + 1}, {len(rollout.token_ids)} tokens"
        if rollout.episode is not None:
            yield f"{sample} in {len(rollout.turns)} turns, {_how_it_ended(rollout.episode)}"
            yield from _turns(rollout, decode)
        else:
            yield f"{sample}, {'cut off' if rollout.truncated else 'ended'}\n{text}"


def _how_it_ended(episode: Episode) -> str:
    """What cut an episode, and its verdict where it has one."""
    end = f"cut by {episode.cut}" if episode.cut else "ended"
    if episode.verdict is None:
        return end
    status, note = episode.verdict.status, episode.verdict.note
    return f"{end}, {status}{f' ({note})' if note and note != end else ''}"


def _turns(rollout: Rollout, decode: Callable[[Sequence[int]], str]) -> Iterator[str]:
    """Yield what an episode's policy has seen and what it has done, under a title each."""
    from vapo_megatron.rollout.turn_records import turn_records

    yield f"[beginning]\n{decode(rollout.prompt.token_ids)}"
    for number, turn in enumerate(turn_records(rollout, decode), 1):
        yield f"[action {number}, reward {turn['reward']:g}]\n{turn['action']}"
        if turn["observation"]:
            yield f"[observation {number}]\n{turn['observation']}"


def _parser() -> Parser:
    usage = "vapo sample --checkpoint DIR (--prompt TEXT | --data FILE) [options] [field=value ...]"
    parser = Parser(prog="vapo sample", usage=usage, description=__doc__)
    what = parser.add_argument_group("what")
    shared.add_checkpoint(what)
    what.add_argument("--prompt", metavar="TEXT", help="of a user")
    what.add_argument("--plain", action="store_true", help="give the prompt without a template")
    what.add_argument("--data", type=Path, metavar="FILE", help="JSONL or parquet, as to train on")
    what.add_argument(
        "--problems", type=int, default=1, metavar="N", help="the file's first N (default: 1)"
    )
    shared.add_sampling(parser, samples=4)
    return parser
