"""vLLM requests, and what is read from its completions, finished or interrupted.

Imported by engine.py alone, once vLLM may be imported.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import FinishReason

from vapo_megatron.rollout.requests import Request, SamplingSettings, continued_seed

LEAST_BIAS = -100.0
"""What a banned token's logit loses: the most that vLLM takes."""


def request(sampling: SamplingSettings, stop: Sequence[int], asked: Request) -> SamplingParams:
    """Return vLLM's parameters of a response that begins or goes on.

    Inserted tokens count towards the longest response, but not towards the seed.
    """
    sampled = len(asked.rollout.token_ids)
    left = sampling.max_response_tokens - sampled - asked.rollout.num_inserted
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=left if asked.max_tokens is None else min(left, asked.max_tokens),
        seed=continued_seed(asked.seed, sampled),
        stop_token_ids=list(stop),
        ignore_eos=True,  # Only the stop tokens above.
        logit_bias=dict.fromkeys(asked.banned, LEAST_BIAS) if asked.banned else None,
        logprobs=0,  # Only of the sampled token.
        flat_logprobs=True,  # Lists of numbers: half the memory of a dict per token.
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def sampled(completion: Any) -> tuple[array[int], array[float]]:
    """Return a completion's tokens and their log-probabilities."""
    token_ids, flat = array("i", completion.token_ids), completion.logprobs
    assert flat.token_ids == list(completion.token_ids), (
        f"log-probabilities of {flat.token_ids} for {completion.token_ids}"
    )
    return token_ids, array("f", flat.logprobs)


def routes_of(completion: Any) -> np.ndarray | None:
    """Return uint8 [tokens read, layers * experts per token]: the experts of each token.

    Layer by layer, those without experts among them, of prompt and response but for its last token.
    None: it was cut before its first token.
    """
    routes = completion.routed_experts
    if routes is None and not completion.token_ids:
        return None
    assert routes is not None and routes.dtype == np.uint8, f"vLLM returned routes {routes}"
    return np.ascontiguousarray(routes).reshape(len(routes), -1)


def unfinished(engine: Any) -> dict[str, Any]:
    """Return what an LLMEngine has sampled of each request that is not finished, by its name."""
    found, states = {}, engine.output_processor.request_states
    for state in states.values():
        # As vLLM does where it aborts a request that somebody waits for.
        output = state.make_request_output([], None, FinishReason.ABORT, None)
        found[output.request_id] = output.outputs[0]
    return found
