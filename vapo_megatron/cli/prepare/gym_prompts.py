"""The text of a prompt with a reasoning_gym problem: instruction, system prompt and examples."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from vapo_megatron.cli.prepare.gym_problems import Drawn
from vapo_megatron.cli.prepare.prepare import make_template
from vapo_megatron.cli.prepare.summary import Template
from vapo_megatron.errors import ConfigError, DataError
from vapo_megatron.reward.gym_verifier import FORMS
from vapo_megatron.rollout.tokenizer import ChatTemplate

INSTRUCTIONS = (
    "Solve the following problem step by step. The last line of your response should be of the "
    "form Answer: $Answer (without quotes) where $Answer is the answer to the problem.",
    "Solve the following problem step by step. Give the answer to the problem alone between "
    "<answer> and </answer> at the end of your response.",
)
"""As FORMS."""


class Prompts:
    """Makes the text of a prompt; see --template, --system and --shots."""

    def __init__(self, template: Template, tokenizer: Any, system: str, *, tags: bool) -> None:
        make_template(template, tokenizer)  # Refuses a tokenizer without a chat template.
        self.template = template
        self._system = system
        self._tags = tags
        self._as_chat = ChatTemplate(tokenizer)

    def of(self, task: str, drawn: Mapping[str, Drawn]) -> Callable[[str], str]:
        """Return what makes a prompt of a task's question.

        Args:
            task: its name.
            drawn: all of its problems: if one has an answer of several lines, all are asked alike.
        """
        problems = itertools.chain.from_iterable(part.problems for part in drawn.values())
        kind = int(self._tags or not all(problem.is_one_line for problem in problems))
        examples = []
        for problem in drawn["examples"].problems:
            if problem.answer is None:
                raise ConfigError(
                    f"--shots: the task {task} gives no answers that could be shown; leave it out"
                )
            examples.append((problem.question, FORMS[kind].format(problem.answer)))
        if self.template == "answer":
            parts = [self._system, INSTRUCTIONS[kind], *map("\n".join, examples)]
            head = "".join(f"{part}\n\n" for part in parts if part)
            return lambda question: f"{head}{question}\n"
        if self.template == "none" and not (self._system or examples):
            return str
        instruction = "" if self.template == "none" else f"{INSTRUCTIONS[kind]}\n\n"
        earlier = [_message("system", self._system)] if self._system else []
        for question, answer in examples:
            earlier += [_message("user", instruction + question), _message("assistant", answer)]
        return lambda question: self._chat([*earlier, _message("user", instruction + question)])

    def _chat(self, messages: list[dict[str, Any]]) -> str:
        try:
            return self._as_chat(messages)
        except DataError as error:
            raise DataError(
                f"--system and --shots: the messages cannot be written, because {error}; leave "
                "them out, or give --template answer"
            ) from None


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}
