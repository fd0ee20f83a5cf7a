"""A verifier with a metric of its own, for runs in which verdicts differ."""

from vapo_megatron.reward.verifier import Verdict


class Lengths:
    """Refuses problems whose answer is "none"; a response of an even length is correct."""

    def check(self, problem):
        return "is refused" if problem.answer == "none" else None

    def score(self, responses, problems):
        lengths = [len(text) for text in responses]
        return [Verdict("wrong" if n % 2 else "correct", metrics={"letters": n}) for n in lengths]
