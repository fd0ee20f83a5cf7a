"""A verifier whose verdicts a test chooses: a response is its score, or no number at all."""

from vapo_megatron.reward.verifier import Verdict


class Graded:
    """Correct from .5 on; what is no number fails, but for the response that tries it out."""

    def score(self, responses, problems):
        scores = [0.0 if "made up" in text else float(text) for text in responses]
        return [Verdict("correct" if score >= 0.5 else "wrong", score=score) for score in scores]
