"""Samples a tiny model with transformers and torch only, independently of the trainer and vLLM."""

from __future__ import annotations

import collections

import task
import torch
from transformers import DynamicCache, PreTrainedModel


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    prompts: list[list[int]],
    *,
    stop_token_id: int,
    seed: int,
    temperature: float = 1.0,
    max_tokens: int = task.SHORT.max_response_tokens,
) -> list[list[int]]:
    """Sample one response for each prompt.

    Args:
        model: causal language model.
        prompts: token ids; those of equal length form a batch without padding.
        stop_token_id: ends a response and is part of it.
        seed: of the sampling.
        temperature: 1 samples from the model's own distribution.
        max_tokens: of a response.

    Returns:
        Token ids in the order of the prompts, at most max_tokens each.
    """
    generator = torch.Generator().manual_seed(seed)
    by_length = collections.defaultdict(list)
    for index, prompt in enumerate(prompts):
        by_length[len(prompt)].append(index)
    responses: list[list[int]] = [[] for _ in prompts]
    for _, indices in sorted(by_length.items()):
        running = torch.tensor(indices)
        ids = torch.tensor([prompts[i] for i in indices])
        cache = DynamicCache(config=model.config)
        for _ in range(max_tokens):
            logits = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]
            ids = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            for index, token in zip(running.tolist(), ids[:, 0].tolist(), strict=True):
                responses[index].append(token)
            going = (ids[:, 0] != stop_token_id).nonzero()[:, 0]
            if len(going) == 0:
                break
            if len(going) < len(ids):
                running, ids = running[going], ids[going]
                cache.batch_select_indices(going)
    return responses
