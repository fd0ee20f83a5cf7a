"""Registry of a run's phases: description, timeout and device placement of each.

Phases are entered by constant, so that a misspelt name fails on import.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Role = Literal["actor", "critic", "reference", "reward_model"]
VALUE_ROLES = ("critic", "reward_model")
"""Roles whose model has one output for each token, in place of the vocabulary's."""
Held = Literal["nothing", "parameters", "state", "training"]
"""How much of a model is on the device, from least to most; see parallel/offload.py."""


class Phase(NamedTuple):
    """Properties of a phase."""

    sentence: str
    """What happens in it, for the user."""
    limit: str
    """Field of `timeouts` that limits its time without progress."""
    device: Mapping[Role, Held] | None
    """How much of each model it needs on the device, with vLLM asleep. None: leave the device as
    it is; generation and evaluation wake vLLM themselves."""
    is_timed: bool
    """Whether its time and peak memory are metrics."""


class Span(NamedTuple):
    """When a process was in a phase."""

    phase: str
    step: int
    """From 1."""
    begin: float
    """Seconds since 1970, by the process' own clock."""
    end: float


PHASES: dict[str, Phase] = {}
"""By name, in the order of a step."""


def _phase(
    name: str,
    sentence: str,
    *,
    limit: str = "other_seconds",
    device: Mapping[Role, Held] | None = None,
    is_timed: bool = True,
) -> str:
    PHASES[name] = Phase(sentence, limit, device, is_timed)
    return name


START = _phase("start", "vLLM and the models are built", limit="start_seconds", is_timed=False)
BETWEEN = _phase("the work between phases", "metrics are reduced and written", is_timed=False)
GENERATION = _phase("generation", "vLLM samples the responses", limit="generation_seconds")
REWARD = _phase("reward", "the last responses are verified; the others were during generation")
REPLAY = _phase("replay", "responses are read from a dump")
EXCHANGE = _phase("exchange", "responses move to the ranks that train on them")
REWARD_SCORES = _phase(
    "reward_scores",
    "reward model's forward pass on the responses that it judges",
    device={"reward_model": "parameters"},
)
DUMP = _phase("dump", "responses are dumped for a replay")
VALUES = _phase("values", "critic's forward pass", device={"critic": "parameters"})
LOGPROBS = _phase(
    "logprobs", "actor's forward pass before the update", device={"actor": "parameters"}
)
REFERENCE_LOGPROBS = _phase(
    "reference_logprobs",
    "reference policy's forward pass",
    device={"reference": "parameters"},
)
ADVANTAGES = _phase("advantages", "generalised advantage estimation")
CRITIC_UPDATE = _phase(
    "critic_update", "critic's updates", limit="update_seconds", device={"critic": "training"}
)
ACTOR_UPDATE = _phase(
    "actor_update", "actor's updates", limit="update_seconds", device={"actor": "training"}
)
SYNC = _phase("sync", "weights are sent to vLLM", device={"actor": "parameters"})
# Nothing at first: the writer brings one role at a time to the device.
CHECKPOINT = _phase("checkpoint", "state is saved", limit="checkpoint_seconds", device={})
EVALUATION = _phase(
    "evaluation",
    "held-out problems are sampled and verified, or the loss on given responses is computed",
    limit="generation_seconds",
)
EXPORT = _phase(
    "export",
    "the actor is written for transformers and vLLM",
    limit="checkpoint_seconds",
    device={"actor": "parameters"},
    is_timed=False,
)

TIMED = tuple(name for name, phase in PHASES.items() if phase.is_timed)
"""Timed phases; they never overlap."""
