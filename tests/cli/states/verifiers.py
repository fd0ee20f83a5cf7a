"""Verifiers of steps for the tests: of one's own, and one that judges a group."""


def known(response, prompt):
    """A step is good unless the state has it already."""
    return response not in prompt


def together(responses):
    return [True for _ in responses]
