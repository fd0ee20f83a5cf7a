"""An environment of SkyRL's API that asks for what cannot be done."""

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


class Changes(BaseTextEnv):
    """Changes the prompt, or the action."""

    def __init__(self, env_config, extras):
        super().__init__()
        self.kind = extras["kind"]

    def init(self, prompt):
        """Begin."""
        if self.kind == "prompt":
            return [{"role": "system", "content": "Be brief."}, *prompt], {}
        return [*prompt, {"role": "user", "content": "more"}], {}

    def step(self, action):
        """Act."""
        return BaseTextEnvStepOutput(
            observations=[], reward=0.0, done=False, metadata={}, postprocessed_action=f"{action}!"
        )
