"""The verifier `environment`: episodes arrive with a verdict, so that it is asked about none.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from vapo_megatron.data.problems import Problem
from vapo_megatron.reward.verifier import RunningVerifier, Verdict


class EnvironmentVerifier(RunningVerifier):
    """Accepts every row; a response that no environment has judged has failed."""

    def score(self, responses: Sequence[str], problems: Sequence[Problem]) -> list[Verdict]:
        """Return a failed verdict for each response."""
        return [Verdict("failed", note="no environment has judged it") for _ in responses]
