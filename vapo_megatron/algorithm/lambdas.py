"""Lambdas of GAE from the configuration and response lengths; does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


def length_adaptive_lambda(lengths: Tensor | NDArray[Any], alpha: float) -> Any:
    """Length-adaptive lambda: the horizon of GAE is a fixed multiple of the response length.

        1 / (1 - lambda) = alpha * l,   lambda = max(0, 1 - 1 / (alpha * l))

    Source: VAPO (arXiv 2504.05118), length-adaptive GAE; alpha 0.05.

    Args:
        lengths: [B] integer or float, response lengths l in tokens, including the stop token; a
            tensor, or a numpy array for callers without torch.
        alpha: above 0.

    Returns:
        float64 [B] in [0, 1); float32 would lose the fifth digit of a long response's horizon.
        Lambda is 0 for l <= 1/alpha, and for an empty response.

    Raises:
        ValueError: alpha not above 0, or lengths of a float type below float32.
    """
    if not alpha > 0:
        raise ValueError(f"length_adaptive_alpha={alpha} must be above 0")
    # For alpha * l <= 1 lambda is 0; clipping also avoids dividing by 0.
    return 1 - 1 / (alpha * _float64(lengths)).clip(min=1)


def _float64(lengths: Any) -> Any:
    if not hasattr(lengths, "double"):
        return lengths.astype("float64")
    if lengths.is_floating_point():
        from vapo_megatron.algorithm.reduction import require_wide

        require_wide(lengths=lengths)
    return lengths.double()


def resolve_lambdas(
    lengths: Tensor | NDArray[Any],
    *,
    lambda_actor: float | str,
    lambda_critic: float | str,
    length_adaptive_alpha: float,
) -> tuple[Any, Any]:
    """Turn the configured lambdas into the arguments of decoupled_gae.

    Args:
        lengths: [B] integer, response lengths in tokens, including the stop token.
        lambda_actor: in [0, 1], or "adaptive".
        lambda_critic: in [0, 1], or "same_as_actor".
        length_adaptive_alpha: used only if lambda_actor is "adaptive".

    Returns:
        (lambda_actor, lambda_critic), each a float or float64 [B]; the same object for
        "same_as_actor".

    Raises:
        ValueError: any other string.
    """
    if lambda_actor == "adaptive":
        actor: float | Tensor = length_adaptive_lambda(lengths, length_adaptive_alpha)
    elif isinstance(lambda_actor, str):
        raise ValueError(f'lambda_actor={lambda_actor!r} must be a number or "adaptive"')
    else:
        actor = float(lambda_actor)
    if lambda_critic == "same_as_actor":
        return actor, actor
    if isinstance(lambda_critic, str):
        raise ValueError(f'lambda_critic={lambda_critic!r} must be a number or "same_as_actor"')
    return actor, float(lambda_critic)
