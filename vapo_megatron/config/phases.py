"""The phases of a run: one registry for their names, sentences, time limits and the device.

A phase is entered by its constant, so that one which is not registered fails on import.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Role = Literal["actor", "critic", "reference"]
Held = Literal["nothing", "parameters", "state", "training"]
"""How much of a model is on the device, from least to most; see parallel/offload.py."""


class Phase(NamedTuple):
    """What belongs to a phase's name."""

    sentence: str
    """For people: what happens in it."""
    limit: str
    """Field of `timeouts` with the seconds that it may go on without progress."""
    device: Mapping[Role, Held] | None
    """What it holds of each model on the device, and nothing of vLLM. None: as it was before;
    generation and evaluation wake vLLM themselves."""
    is_timed: bool
    """Its seconds and memory stand in the step's row."""


PHASES: dict[str, Phase] = {}
"""In the order of a step."""


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
REWARD = _phase("reward", "responses are verified")
DUMP = _phase("dump", "responses are kept for a replay")
REPLAY = _phase("replay", "responses are read from a dump")
EXCHANGE = _phase("exchange", "responses move to the ranks that train on them")
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
SYNC = _phase("sync", "new weights go to vLLM", device={"actor": "parameters"})
# The writer brings one role after the other to the device itself.
CHECKPOINT = _phase("checkpoint", "state is saved", limit="checkpoint_seconds", device={})
EVALUATION = _phase(
    "evaluation", "held-out problems are sampled and judged", limit="generation_seconds"
)
EXPORT = _phase(
    "export",
    "the actor is written for transformers and vLLM",
    limit="checkpoint_seconds",
    device={"actor": "parameters"},
    is_timed=False,
)

TIMED = tuple(name for name, phase in PHASES.items() if phase.is_timed)
"""Phases of a step, whose seconds do not overlap."""
