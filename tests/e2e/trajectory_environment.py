"""An environment for test_trajectories.py: names a digit until the policy says a smaller one."""

from vapo_megatron.environments import Step


class Digits:
    """Ends with the verdict that the row's answer was said; what it says are known words."""

    def reset(self, problem, seed):
        """Begin."""
        self.answer, self.turns = problem.answer, 0
        return " w"

    def step(self, action):
        """Compare."""
        self.turns += 1
        if self.answer in action or self.turns == 3:
            return Step(done=True, verdict=self.answer in action)
        return Step(" w w")
