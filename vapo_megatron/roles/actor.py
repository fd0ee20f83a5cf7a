"""The actor, i.e. the policy that is trained and sampled from, and its frozen reference."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from vapo_megatron.algorithm.actor_loss import LossCounts, LossSettings, LossTokens, actor_loss
from vapo_megatron.algorithm.agreement import RATIO_LIMITS, LogprobsDiffer, excess
from vapo_megatron.config import VapoConfig
from vapo_megatron.config.metrics import emits
from vapo_megatron.data.microbatch import Microbatch
from vapo_megatron.models.build import gather_hidden, output_weight
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.models.routes import Mode, RouterReplay
from vapo_megatron.parallel.context import gather_tokens
from vapo_megatron.parallel.groups import Ranks
from vapo_megatron.parallel.logprobs import linear_logprobs
from vapo_megatron.parallel.minibatches import MiniBatch
from vapo_megatron.parallel.optimizer import learning_rate
from vapo_megatron.parallel.reduce import max_over_world
from vapo_megatron.parallel.schedule import Before, forward_only
from vapo_megatron.roles.base import Base
from vapo_megatron.roles.placed import PlacedModel, load_model
from vapo_megatron.roles.trained import TrainedModel, mean_of_updates


class Policy:
    """A model whose last stage predicts tokens."""

    placed: PlacedModel

    def __init__(self, shape: ModelShape, config: VapoConfig, ranks: Ranks) -> None:
        self.shape, self.config, self.ranks = shape, config, ranks

    def logprobs(
        self, output: Tensor, microbatch: Microbatch, *, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return (logprobs, entropy) of the response tokens, [T] each, at rollout.temperature.

        Args:
            output: the model's on the microbatch.
            microbatch: its input, this context-parallel rank's part.
            with_entropy: False: return None for the entropy.
        """
        sequence_parallel = self.config.parallel.sequence_parallel
        hidden = gather_hidden(output, sequence_parallel=sequence_parallel)
        logprobs, entropy = linear_logprobs(
            hidden[microbatch.predicting],
            output_weight(self.placed.model[-1]),
            microbatch.targets,
            self.ranks.tp_group,
            vocab_size=self.shape.vocab_size,
            temperature=self.config.rollout.temperature,
            with_entropy=with_entropy,
        )
        logprobs = gather_tokens(logprobs, microbatch, self.ranks)
        if entropy is not None:
            entropy = gather_tokens(entropy, microbatch, self.ranks)
        return logprobs, entropy


def loss_settings(config: VapoConfig) -> LossSettings:
    """Return the configuration fields that the actor's loss depends on."""
    fields = dict(config.algorithm) | {
        "max_response_tokens": config.rollout.max_response_tokens,
        "high_ratio_difference": RATIO_LIMITS[config.model.dtype].high,
    }
    return LossSettings(**{name: fields[name] for name in LossSettings._fields})


class Actor(Policy):
    """Policy model; `trained` updates it, and is None with stage=value_pretraining."""

    def __init__(
        self,
        shape: ModelShape,
        config: VapoConfig,
        ranks: Ranks,
        hf_path: str | None,
    ) -> None:
        """Build it; hf_path: initial weights, None: a checkpoint is loaded later."""
        super().__init__(shape, config, ranks)
        loaded = load_model(shape, config, ranks, "actor", hf_path)
        self.trained: TrainedModel | None = None
        if "actor" in config.algorithm.trained_roles:
            self.trained = TrainedModel(loaded, shape, config, ranks, "actor")
        self.placed = self.trained.placed if self.trained else PlacedModel(loaded)
        self.replay: RouterReplay | None = None
        if config.algorithm.router_replay != "off" and shape.experts is not None:
            self.replay = RouterReplay(loaded.model, shape.experts.count)

    def compute_logprobs(
        self, microbatches: Sequence[Microbatch], *, replays: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Return (logprobs, entropy) of the response tokens, no gradient; both float32 [T], CPU.

        T runs over the response tokens of all microbatches in order. Both are at the rollout's
        temperature; entropy is in nats. With router replay the routes of these passes are
        remembered for the updates, or are the sampler's; replays=False: neither.
        """

        def head(output: Tensor, microbatch: Microbatch) -> Tensor:
            logprobs, entropy = self.logprobs(output, microbatch, with_entropy=True)
            assert entropy is not None
            return torch.stack([logprobs, entropy], dim=-1)

        # Routes that are held are the sampler's; else these passes' are.
        mode: Mode = "score" if self.config.algorithm.router_replay == "r3" else "record"
        with self._routes(mode if replays else "live") as before:
            results = forward_only(self.placed.chunks, microbatches, head, before=before)
        both = torch.cat(results).cpu()
        return both[:, 0].contiguous(), both[:, 1].contiguous()

    @contextlib.contextmanager
    def _routes(self, mode: Mode) -> Iterator[Before | None]:
        """Record or replay routes in the body, with what schedule.py is to call; None: neither."""
        if self.replay is None or mode == "live":
            yield None
            return
        with self.replay.during(mode):
            yield self.replay.begin

    @emits(
        "actor/other_routes_fraction",
        "actor/loss",
        "actor/policy_loss",
        "actor/positive_lm_loss",
        "actor/reference_kl",
        "actor/reference_kl_tangent_fraction",
        "actor/approx_kl",
        "actor/clip_fraction_low",
        "actor/clip_fraction_high",
        "actor/first_ratio_diff_mean",
        "actor/first_ratio_diff_high_fraction",
        "actor/first_ratio_diff_max",
        "actor/grad_norm",
        "actor/skipped_updates",
        "actor/learning_rate",
    )
    def update(self, mini_batches: Sequence[MiniBatch]) -> dict[str, float]:
        """Make one update per mini-batch.

        Returns:
            Metrics averaged over the updates, see mean_of_updates; first_ratio_diff_* are those of
            the first mini-batch. Without a policy loss those of a ratio are missing.

        Raises:
            UpdatesSkipped: on every rank.
            LogprobsDiffer: on every rank; see _check_ratio.
        """
        assert self.trained is not None
        updates: list[dict[str, Tensor]] = []
        first: dict[str, Tensor] = {}
        for mini_batch in mini_batches:
            loss_function = partial(self._loss, mini_batch)
            rate = learning_rate(self.trained.num_updates, self.config.optimizer, "actor")
            with self._routes("update") as before:
                learned = self.trained.update(mini_batch, loss_function, rate, before)
            if not mini_batch.counts["positive_tokens"]:
                # Undefined, and a 0 would bias the mean over the updates.
                del learned["positive_lm_loss"]
            updates.append(learned)
            ratios = {n: learned.pop(n) for n in list(learned) if n.startswith("ratio_diff_")}
            if len(updates) == 1 and ratios:
                ratios["ratio_diff_max"] = max_over_world(ratios["ratio_diff_max"].cpu())
                first = {f"first_{name}": value for name, value in ratios.items()}
                # The inference engine's weights may be older, and its arithmetic is another.
                is_own = self.config.rollout.behaviour == "recomputed"
                if is_own and learned["grad_norm"].isfinite():
                    self._check_ratio(ratios)
        totals = {**first, **mean_of_updates(updates)}
        totals["learning_rate"] = torch.tensor(rate, dtype=torch.float64)
        if self.replay is not None:
            totals["other_routes_fraction"] = torch.tensor(self.replay.take_other_fraction())
        return {f"actor/{name}": float(value) for name, value in totals.items()}

    def compute_gradients(self, mini_batch: MiniBatch) -> dict[str, Tensor]:
        """Leave one mini-batch's reduced gradient in the DDP buffers; return metrics."""
        assert self.trained is not None
        with self._routes("update") as before:
            return self.trained.compute_gradients(
                mini_batch, partial(self._loss, mini_batch), before
            )

    def _loss(
        self, mini_batch: MiniBatch, output: Tensor, microbatch: Microbatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        algorithm, batch = self.config.algorithm, microbatch.batch
        with_entropy = algorithm.entropy_coef > 0
        logprobs, entropy = self.logprobs(output, microbatch, with_entropy=with_entropy)
        assert algorithm.kl_coef == 0 or batch.reference_logprobs is not None
        tokens = LossTokens(
            old_logprobs=batch.old_logprobs,
            rollout_logprobs=batch.rollout_logprobs,
            advantages=batch.advantages,
            reference_logprobs=batch.reference_logprobs if algorithm.kl_coef > 0 else None,
            cu_seqlens=batch.cu_seqlens,
            loss_mask=batch.loss_mask,
            policy_weights=batch.policy_weights,
            is_positive=batch.is_positive,
            positive_weights=batch.positive_weights,
        )
        counts = LossCounts(*(mini_batch.counts[name] for name in LossCounts._fields))
        settings = loss_settings(self.config)
        return actor_loss(logprobs, entropy, tokens, counts, settings)

    def _check_ratio(self, ratios: Mapping[str, Tensor]) -> None:
        """Check that the first mini-batch's ratios differ from 1 by rounding only.

        Weights and microbatches are then those that old_logprobs were computed with.

        Raises:
            LogprobsDiffer: on every rank, because the numbers are global.
        """
        mean, high = (float(ratios[f"ratio_diff_{n}"]) for n in ("mean", "high_fraction"))
        found = excess(mean, high, RATIO_LIMITS[self.config.model.dtype])
        if found:
            raise LogprobsDiffer(
                f"the ratio in the step's first mini-batch differs from 1 by {found}: the update "
                "and old_logprobs used different inputs or weights"
            )


class Reference(Policy):
    """The frozen reference policy, model.hf_path, for the KL loss.

    Sharded like the actor, but without optimizer, gradient buffers and DDP. It is not part of
    checkpoints; a resumed run reads model.hf_path again.
    """

    def __init__(
        self, shape: ModelShape, config: VapoConfig, ranks: Ranks, shared: Base | None = None
    ) -> None:
        """Build it; shared: the actor's frozen weights, which it then computes with."""
        super().__init__(shape, config, ranks)
        path = config.model.hf_path
        self.placed = PlacedModel(load_model(shape, config, ranks, "reference", path, shared))

    def compute_logprobs(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """Return logprobs of the response tokens at the rollout's temperature; float32 [T], CPU."""

        def head(output: Tensor, microbatch: Microbatch) -> Tensor:
            return self.logprobs(output, microbatch, with_entropy=False)[0]

        return torch.cat(forward_only(self.placed.model, microbatches, head)).cpu()
