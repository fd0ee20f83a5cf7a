"""What a rank reads once before a run: model sizes, tokenizer, stop tokens and prompts."""

from __future__ import annotations

from typing import Any, NamedTuple

from vapo_megatron.config import DataConfig, EvaluationConfig, RolloutConfig
from vapo_megatron.data.problems import load_problems
from vapo_megatron.data.prompts import OnProgress, PromptDataset
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.rollout.tokenizer import check_tokenizer, load_tokenizer


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


def read_inputs(
    shape: ModelShape,
    hf_path: str,
    data: DataConfig,
    rollout: RolloutConfig,
    evaluation: EvaluationConfig,
    *,
    seed: int,
    on_progress: OnProgress | None = None,
) -> Inputs:
    """Load the tokenizer; read and tokenize all problems.

    Args:
        shape, hf_path: the model's sizes, and the directory of its tokenizer.
        data, rollout, evaluation: the files, their columns, the stop tokens and the length limit.
        seed: of the order of the training prompts.
        on_progress: called with (tokenized, all) prompts of each file.

    Raises:
        ConfigError: the tokenizer does not load or is not the model's; see rollout/tokenizer.py.
        DataError: a file or a problem cannot be used; see data/problems.py and data/prompts.py.
    """
    tokenizer = load_tokenizer(hf_path)
    stop = check_tokenizer(hf_path, tokenizer, rollout.stop_token_ids, shape.vocab_size)

    def read(path: str, shuffle: bool) -> PromptDataset:
        return PromptDataset(
            load_problems(path, data.prompt_column, data.answer_column), tokenizer.encode,
            path=path, seed=seed, shuffle=shuffle, max_prompt_tokens=rollout.max_prompt_tokens,
            on_progress=on_progress,
        )  # fmt: skip

    dataset = read(str(data.train_path), data.shuffle)
    held_out = None if evaluation.path is None else read(evaluation.path, False)
    return Inputs(shape, tokenizer, stop, dataset, held_out)
