"""Print a few responses of a checkpoint, to a prompt of your own or to problems of a file.

  vapo sample --checkpoint RUN --prompt "What is 6 times 7?" --samples 3
  vapo sample --checkpoint models/Qwen2.5-0.5B --data problems.jsonl --problems 2 --temperature 0

The checkpoint is a Hugging Face directory, or a run directory, which brings its hf_export and its
configuration. A prompt becomes a user's message where the tokenizer has a chat template; --plain
gives it as it is. Nothing is judged: vapo evaluate does that.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vapo_megatron.cli.command import Parser, under_torchrun
from vapo_megatron.cli.sampling import options as shared
from vapo_megatron.errors import ConfigError

if TYPE_CHECKING:
    from vapo_megatron.cli.sampling.inputs import Evaluation
    from vapo_megatron.config import VapoConfig
    from vapo_megatron.data.rollout import Prompt, Rollout


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0; 2 for a user's mistake; 130 when interrupted."""
    return shared.main_of("sample", _parser(), _sample, argv, interrupted="nothing was kept")


def _sample(options: argparse.Namespace, worker: Sequence[str]) -> str | None:
    if (options.prompt is None) == (options.data is None):
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
    texts = decode_responses(evaluation.inputs.tokenizer, [r.token_ids for r in rollouts])
    return "\n".join(_lines(rollouts, texts)) if rollouts else None


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
    from vapo_megatron.algorithm.group_sampling import repeat_for_group
    from vapo_megatron.cli.sampling.engine import VERSION, build_engine, distributed
    from vapo_megatron.rollout.evaluation.judging import sampling_settings
    from vapo_megatron.rollout.work import generate

    samples = config.evaluation.samples
    settings = sampling_settings(config.evaluation, config.rollout.max_response_tokens)
    with distributed(config) as stack:
        engine = build_engine(evaluation, config)
        stack.callback(engine.shutdown)
        asked = repeat_for_group(list(prompts), samples)
        return generate(engine, asked, [samples] * len(prompts), 0, settings, VERSION)


def _lines(rollouts: Iterable[Rollout], texts: Iterable[str]) -> Iterable[str]:
    """Yield each prompt once, and its responses."""
    for rollout, text in zip(rollouts, texts, strict=True):
        if rollout.sample == 0:
            answer = rollout.prompt.answer
            yield f"=== prompt{f' (answer: {answer})' if answer else ''}\n{rollout.prompt.text}"
        end = "cut off" if rollout.truncated else "ended"
        yield f"--- sample {rollout.sample + 1}, {len(rollout.token_ids)} tokens, {end}\n{text}"


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
