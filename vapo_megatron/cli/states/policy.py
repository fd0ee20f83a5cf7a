"""The model that will be trained on the states: its trajectories, its stop tokens, its context."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vapo_megatron.config import VapoConfig
from vapo_megatron.data.chat import Message, Render
from vapo_megatron.data.trajectories import Header, Trajectory, check_ends
from vapo_megatron.errors import ConfigError, DataError
from vapo_megatron.models.hf_config import read_model_shape
from vapo_megatron.rollout.evaluation.samples_file import weights_digest
from vapo_megatron.rollout.input_warnings import end_of_turn
from vapo_megatron.rollout.tokenizer import ChatTemplate, check_tokenizer, load_tokenizer


class Policy(NamedTuple):
    """What the model to train makes of a state."""

    tokenizer: Any
    """transformers'."""
    render: Render
    max_prompt_tokens: int


def transcript(messages: Sequence[Message], **_: Any) -> str:
    """Return a chat as a text for a judge, where no tokenizer has a template for it."""
    return "\n\n".join(f"[{message['role']}]\n{message['content']}" for message in messages)


def check_policy(
    header: Header, trajectories: Sequence[Trajectory], config: VapoConfig, *, accepts_others: bool
) -> Policy:
    """Check that the trajectories are the model's, and that it stops where their actions end.

    Args:
        header: of the file.
        trajectories: with actions that end where their calls do.
        config: of the run that trains on the states; has model.hf_path.
        accepts_others: trajectories of other models too.

    Raises:
        UserError: what is wrong, and the remedy.
    """
    hf_path = str(config.model.hf_path)
    tokenizer = load_tokenizer(hf_path)
    shape = read_model_shape(hf_path)
    stops = check_tokenizer(hf_path, tokenizer, config.rollout.stop_token_ids, shape.vocab_size)
    found = weights_digest(Path(hf_path))
    if found != header.weights and not accepts_others:
        raise DataError(
            f"the header's weights={header.weights!r} are another model's: model.hf_path={hf_path} "
            f"has {found!r}; set model.hf_path to the model that sampled the trajectories, or give "
            "--other-model"
        )
    turn = end_of_turn(tokenizer) if header.chat else None
    if turn is None or turn[1] not in stops:
        if header.chat and not header.ends:
            raise ConfigError(_no_end(turn, stops))
        _check_tokens(header, tokenizer, stops, hf_path)
        check_ends(header, trajectories)
        if not header.chat:
            _check_last_tokens(header, trajectories, tokenizer, hf_path)
    return Policy(tokenizer, ChatTemplate(tokenizer), config.rollout.max_prompt_tokens)


def _no_end(turn: tuple[str, int] | None, stops: Sequence[int]) -> str:
    """Say why no token would end an action of a chat."""
    listed = ", ".join(map(str, stops))
    learns = "a policy would act on behind its turn, and learn to write what it will be told"
    if turn is None:
        return (
            "the tokenizer has no chat template that ends a turn with one token, and the header "
            f"has no ends: {learns}; use a chat model, or trajectories that have ends"
        )
    fixed = ",".join(map(str, sorted({*stops, turn[1]})))
    return (
        f"the chat template ends a turn with {turn[0]} ({turn[1]}), which is no stop token (they "
        f"are {listed}): {learns}; set rollout.stop_token_ids=[{fixed}]"
    )


def _check_tokens(header: Header, tokenizer: Any, stops: Sequence[int], hf_path: str) -> None:
    """Refuse ends that are no stop tokens."""
    ids = {end: tokenizer.encode(end, add_special_tokens=False) for end in header.ends}
    for end, tokens in ids.items():
        if len(tokens) != 1:
            raise DataError(
                f"the header's ends have {end!r}, which is {len(tokens)} tokens of "
                f"model.hf_path={hf_path}: sampling can stop at one token alone; use a model that "
                "has one for it, or sample chats"
            )
    if missing := sorted({tokens[0] for tokens in ids.values()} - set(stops)):
        fixed = ",".join(map(str, sorted({*stops, *missing})))
        raise ConfigError(
            f"rollout.stop_token_ids must have {', '.join(map(str, missing))}, with which the "
            f"actions of these trajectories end (stop tokens are {', '.join(map(str, stops))}); "
            f"set it to [{fixed}]"
        )


def _check_last_tokens(
    header: Header, trajectories: Sequence[Trajectory], tokenizer: Any, hf_path: str
) -> None:
    """Refuse actions whose end is a token by itself, but not behind what stands before it."""
    ends = {tokenizer.encode(end, add_special_tokens=False)[0] for end in header.ends}
    for trajectory in trajectories:
        for i, step in enumerate(trajectory.steps):
            if step.observation is None:
                continue
            last = tokenizer.encode(step.action, add_special_tokens=False)[-1]
            if last not in ends:
                raise DataError(
                    f"{trajectory.where}: steps[{i}].action={step.action[-20:]!r} ends within the "
                    f"token {tokenizer.decode([last])!r} of model.hf_path={hf_path}, at which "
                    "sampling does not stop; use ends that are tokens behind any text"
                )
