"""What a rank reads once before a run: model sizes, tokenizer, stop tokens and prompts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from vapo_megatron.config import (
    DataConfig,
    EnvironmentConfig,
    EvaluationConfig,
    FileConfig,
    RolloutConfig,
    SourceConfig,
)
from vapo_megatron.data.mixture import Mixture
from vapo_megatron.data.problems import load_problems
from vapo_megatron.data.prompts import OnProgress, PromptDataset
from vapo_megatron.environments.configured import schemas_of
from vapo_megatron.errors import ConfigError
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.parallel import store
from vapo_megatron.rollout.response_tokens import ResponseTokens
from vapo_megatron.rollout.special_tokens import begin_of
from vapo_megatron.rollout.tokenizer import ChatTemplate, check_tokenizer, load_tokenizer


class Inputs(NamedTuple):
    """The model's sizes, and what sampling needs; a replay has only the sizes."""

    shape: ModelShape
    tokenizer: Any = None
    """transformers'."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a response, sorted."""
    dataset: PromptDataset | None = None
    """Training prompts."""
    held_out: PromptDataset | None = None
    """Evaluation prompts; None: no evaluation."""
    skip_unusable: bool = False
    """data.skip_unusable, for the rows that a verifier refuses."""
    date: str | None = None
    """What chat templates have written, in ISO form; None: no template asked for the date."""
    again: Callable[..., Inputs] | None = None
    """Reads the same with another `date`."""

    def agreed(self) -> Inputs:
        """Return these inputs with the date that the first process to ask has, after store.join.

        Processes that start around midnight have read different prompts.
        """
        if self.date is None or self.again is None:
            return self
        date = store.agree("date", self.date)
        return self if date == self.date else self.again(date=date)


def read_inputs(
    shape: ModelShape,
    hf_path: str,
    data: DataConfig,
    rollout: RolloutConfig,
    evaluation: EvaluationConfig,
    *,
    seed: int,
    environment: EnvironmentConfig | None = None,
    on_progress: OnProgress | None = None,
    date: str | None = None,
) -> Inputs:
    """Load the tokenizer; read and tokenize all problems.

    Args:
        shape, hf_path: the model's sizes, and the directory of its tokenizer.
        data, rollout, evaluation: the files, their columns, the stop tokens and the length limits.
        seed: of the order of the training prompts.
        environment: has tools, of which prompts tell; None: there are none.
        on_progress: called with (tokenized, all) prompts of each file.
        date: for chat templates that write it; None: today.

    Raises:
        ConfigError: the tokenizer does not load or is not the model's; see rollout/tokenizer.py.
        DataError: a file or a problem cannot be used; see data/problems.py and data/prompts.py.
    """
    tokenizer = load_tokenizer(hf_path)
    stop = check_tokenizer(hf_path, tokenizer, rollout.stop_token_ids, shape.vocab_size)
    template = ChatTemplate(tokenizer, date, tools_of(environment, tokenizer))

    read = functools.partial(
        read_prompts, tokenizer=tokenizer, template=template, seed=seed, on_progress=on_progress,
        max_prompt_tokens=rollout.max_prompt_tokens, skip_unusable=data.skip_unusable,
    )  # fmt: skip
    if data.response_column is not None:
        tokens = ResponseTokens(
            tokenizer, stop, vocab_size=shape.vocab_size, max_tokens=rollout.max_response_tokens
        )
        read = functools.partial(read, response_column=data.response_column, response_tokens=tokens)
    dataset = _training_prompts(data, read)
    held_out: PromptDataset | None = None
    if evaluation.sources:
        files = dict(sorted(evaluation.sources.items()))
        parts = _read_parts(files, read, section="evaluation", shuffle=False)
        held_out = Mixture(parts, lambda steps: dict.fromkeys(files, 1.0))
    elif evaluation.path is not None:
        held_out = read(evaluation.path, data, shuffle=False)
    again = functools.partial(
        read_inputs, shape, hf_path, data, rollout, evaluation, seed=seed, environment=environment,
        on_progress=on_progress,
    )  # fmt: skip
    return Inputs(
        shape, tokenizer, stop, dataset, held_out, data.skip_unusable, template.date, again
    )


def tools_of(environment: EnvironmentConfig | None, tokenizer: Any) -> list[dict[str, Any]]:
    """Return the JSON schemas of the environment's tools.

    Raises:
        ConfigError: it does not load, or there is no chat template to tell of tools.
    """
    schemas = [] if environment is None else schemas_of(environment)
    if schemas and not tokenizer.chat_template:
        raise ConfigError(
            "the environment has tools, but the tokenizer has no chat template that tells the "
            "policy of them; use a model with one, or environment.tools=[]"
        )
    return schemas


def _training_prompts(data: DataConfig, read: Callable[..., PromptDataset]) -> PromptDataset:
    """Read data.train_path, or data.sources by name: their order in the file does not matter."""
    if not data.sources:
        return read(
            str(data.train_path), data, shuffle=data.shuffle,
            critic_prompt_column=data.critic_prompt_column,
        )  # fmt: skip
    sources = dict(sorted(data.sources.items()))
    parts = _read_parts(sources, read, section="data", shuffle=data.shuffle)
    return Mixture(
        parts, lambda steps: {name: source.weight_after(steps) for name, source in sources.items()}
    )


def _read_parts(
    files: Mapping[str, FileConfig], read: Callable[..., PromptDataset], **of_all: Any
) -> dict[str, PromptDataset]:
    parts: dict[str, PromptDataset] = {}
    for name, file in files.items():
        own = file.critic_prompt_column if isinstance(file, SourceConfig) else None
        parts[name] = read(
            str(file.path), file, source=name, verifier=file.verifier, critic_prompt_column=own,
            first_index=sum(map(len, parts.values())), **of_all,
        )  # fmt: skip
    return parts


def read_prompts(
    path: str,
    columns: DataConfig | FileConfig,
    tokenizer: Any,
    *,
    section: str = "data",
    source: str | None = None,
    verifier: str | None = None,
    critic_prompt_column: str | None = None,
    response_column: str | None = None,
    skip_unusable: bool = False,
    template: ChatTemplate | None = None,
    **of_dataset: Any,
) -> PromptDataset:
    """Read a file's problems and tokenize its prompts; chat messages are templated.

    Args:
        path, section, source, verifier, critic_prompt_column, response_column: see load_problems.
        columns: has prompt_column and answer_column.
        tokenizer: transformers'.
        skip_unusable: leave out rows whose answer cannot be read.
        template: of the tokenizer; None: it writes today's date.
        of_dataset: see PromptDataset.

    Raises:
        DataError: see both.
    """
    unreadable: dict[int, str] | None = {} if skip_unusable else None
    problems = load_problems(
        path, columns.prompt_column, columns.answer_column, section=section,
        critic_prompt_column=critic_prompt_column, response_column=response_column,
        source=source, verifier=verifier,
        render=template or ChatTemplate(tokenizer), unreadable=unreadable,
    )  # fmt: skip
    return PromptDataset(
        problems, tokenizer.encode, path=path, source=source, begin=begin_of(tokenizer),
        left_out=unreadable, **of_dataset,
    )  # fmt: skip
