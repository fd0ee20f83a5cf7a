"""The tool `python`: runs a program in the sandbox that judges code, and returns what it prints."""

from __future__ import annotations

import re
from collections.abc import Sequence

from vapo_megatron.environments.step import text
from vapo_megatron.errors import tell
from vapo_megatron.reward.code_verifier import EXTRA_OUTPUT_BYTES, MODULES
from vapo_megatron.sandbox.client import Budget, Outcome, Sandbox

_OWN_FRAMES = re.compile(r'  File "[^"\n]*/vapo_megatron/sandbox/[^\n]*\n(?:    [^\n]*\n)*')
_NOTHING = "(the program printed nothing)"


class PythonTool:
    """A tool; its programs are confined as the verifier `code` confines those of responses.

    A sandbox is started for each call, in .3 s, and ended after it: so an episode that waits for
    its policy holds no further process, and nothing of a program is left for the next one.

    Args:
        seconds: CPU time of a program; time in which it waits counts a third.
        memory_gb: address space of a program beyond the interpreter's, in 1e9 bytes; the limit of
            the episode's process holds too.
        max_output_characters: of its output and of its errors; of what is longer, the beginning
            and the end remain, respectively.
        modules: what programs can import beside the standard library.
    """

    def __init__(
        self,
        seconds: float = 6.0,
        memory_gb: float = 1.0,
        max_output_characters: int = 10_000,
        modules: Sequence[str] = MODULES,
    ) -> None:
        for name, value, lowest in (
            ("seconds", seconds, 1e-3),
            ("memory_gb", memory_gb, 1e-3),
            ("max_output_characters", max_output_characters, 1),
        ):
            if isinstance(value, bool) or not isinstance(value, int | float) or value < lowest:
                raise ValueError(f"python.{name}={value!r} must be a number, {lowest} at least")
        self._budget = Budget(seconds, int(memory_gb * 1e9), EXTRA_OUTPUT_BYTES)
        self._max_characters = int(max_output_characters)
        self._modules = list(modules)

    def check(self) -> None:
        """Start a sandbox once, and warn if it cannot confine as it should.

        Raises:
            SandboxUnavailable: this machine cannot confine a process, or a module is missing.
        """
        with Sandbox(self._modules) as sandbox:
            refusal = sandbox.refusal
        if refusal:
            tell(
                "warning: the tool python runs programs as this process's own user, because the "
                f"container allows no other ({refusal}): the number of their threads is limited "
                "by their memory alone"
            )

    def python(self, code: str) -> str:
        """Run a Python program, and return what it prints. Nothing is kept from earlier calls.

        Args:
            code: The program. It must print whatever you want to see.

        Returns:
            What it has printed, and its error if it failed.
        """
        with Sandbox(self._modules) as sandbox:
            outcome = sandbox.run(code, "", self._budget)
        return self._shown(outcome)

    def _shown(self, outcome: Outcome) -> str:
        output = text(outcome.output.decode(errors="replace").rstrip(), self._max_characters)
        errors = _OWN_FRAMES.sub("", outcome.errors.decode(errors="replace")).strip()
        errors = errors[-self._max_characters :]
        failure = "" if outcome.failure in errors else f"error: {outcome.failure}"
        return "\n".join(part for part in (output, errors, failure) if part) or _NOTHING
