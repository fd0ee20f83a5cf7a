"""What answers a policy's actions: a user's environments, in processes that can be killed."""

from vapo_megatron.environments.step import Step as Step
