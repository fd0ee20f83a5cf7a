"""A verifier whose verdicts a test chooses: a response is its score, or no number at all."""

from vapo_megatron.reward.verifier import Verdict


class Graded:
    """Correct from .5 on; what is no number fails."""

    def score(self, responses, problems):
        return [
            Verdict("correct" if float(text) >= 0.5 else "wrong", score=float(text))
            for text in responses
        ]
