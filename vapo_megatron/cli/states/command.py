"""Make training prompts of trajectories: a row for each state in which the policy acted.

  vapo states trajectories.jsonl --filter process --out states.jsonl --config run.yaml
  vapo states trajectories.jsonl --filter none --out states.jsonl

A filter keeps or drops a trajectory as a whole: process keeps those whose every step a judge finds
good, outcome those whose final answer is right, both those with both, none all. Steps without a
label are judged by reward.verifier, if the filter needs labels; its verdicts are kept beside the
trajectories (.judged.jsonl), so that an interrupted command resumes and another filter is quick.
Equal states are written once, with their count. The output can be data.train_path as it is.

With model.hf_path, the model to train, it is checked that this model has sampled them and that an
action ends at one of its stop tokens; states longer than rollout.max_prompt_tokens are left out.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from vapo_megatron.cli.command import Parser, run
from vapo_megatron.config import load_config
from vapo_megatron.data.trajectories import FILTERS, check_ends, read_trajectories
from vapo_megatron.errors import ConfigError, tell


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0; 2 for a user's mistake; 130 when interrupted."""
    return run(
        "states", lambda: _states(_parser().parse_intermixed_args(argv)),
        interrupted="the same command resumes from here",
    )  # fmt: skip


def _states(options: argparse.Namespace) -> str:
    _check_out(options)
    config = load_config(options.config, options.overrides)
    header, trajectories = read_trajectories(options.trajectories)
    # What the next lines need loads slowly, or loads torch.
    from vapo_megatron.cli.states.actions import read_actions
    from vapo_megatron.cli.states.judging import judge_steps
    from vapo_megatron.cli.states.policy import check_policy, transcript
    from vapo_megatron.cli.states.selection import select_states

    trajectories, told = read_actions(header, trajectories)
    if not header.chat:
        check_ends(header, trajectories)
    policy = None
    if config.model.hf_path is not None:
        # The model is local, so do not ask the hub; read when transformers is loaded.
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        accepts_others = options.other_model
        policy = check_policy(header, trajectories, config, accepts_others=accepts_others)
    else:
        tell(
            "warning: without model.hf_path it is not checked that these are the model's own "
            "trajectories, that its actions end at a stop token, and that states fit its context"
        )
    if options.filter in ("process", "both"):
        render = transcript if policy is None else policy.render
        trajectories, lines = judge_steps(
            trajectories, header, config.reward, options.trajectories, render
        )
        told += lines
    about = {"trajectories": dict(header.line), "filter": options.filter}
    return "\n".join(told + select_states(trajectories, options.out, options.filter, policy, about))


def _check_out(options: argparse.Namespace) -> None:
    out = options.out
    if out.suffix != ".jsonl":
        raise ConfigError(f"--out={out} must end in .jsonl; change it")
    if out.absolute() == options.trajectories.absolute():
        raise ConfigError(f"--out={out} is the file of trajectories; give another file")
    if out.exists() and not options.overwrite:
        raise ConfigError(f"--out={out} exists; give another file, or --overwrite")


def _parser() -> Parser:
    usage = (
        "vapo states TRAJECTORIES --filter FILTER --out FILE.jsonl [options] "
        "[section.field=value ...]"
    )
    parser = Parser(prog="vapo states", usage=usage, description=__doc__)
    parser.add_argument("trajectories", type=Path, metavar="TRAJECTORIES", help="JSONL file")
    parser.add_argument("--filter", required=True, choices=FILTERS, help="which trajectories stay")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument("--overwrite", action="store_true", help="replace --out")
    parser.add_argument(
        "--config", action="append", default=[], metavar="FILE",
        help="of the run that trains on the states; several are merged, later ones win",
    )  # fmt: skip
    parser.add_argument(
        "--other-model", action="store_true",
        help="accept trajectories of another model than model.hf_path",
    )  # fmt: skip
    parser.add_argument(
        "overrides", nargs="*", metavar="section.field=value",
        help="fields of the run, such as model.hf_path=models/base reward.verifier=steps.py:good "
        "rollout.max_prompt_tokens=4096",
    )  # fmt: skip
    return parser
