"""Dion or Muon for matrices and AdamW for the rest, each parameter updated by one replica.

Before: every rank has the whole gradients of its parameters, summed over the ranks that hold the
same ones (replicas: data and context parallelism). Each parameter has an owner among these, an
embedding one for each piece of its rows, which alone keeps its state and float32 copy. After a step
the updated parameters are gathered, so that replicas are the same bit for bit.

megatron-core's distributed optimizer cannot serve: it cuts buffers of parameters, and matrices with
them. Tensor-parallel ranks own the same parameters, and add up what their columns give, for all
matrices of a layer at once.

Collectives of an update, for a rank that owns matrices of L layers: 2 L (Dion) or 6 L (Muon) over
tensor-parallel ranks, one over all ranks for the gradient's norm, and over replicas one for every
GATHERED elements.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.optim.adamw import adamw

from vapo_megatron.algorithm import dion
from vapo_megatron.algorithm.update_size import rank_of, scale_factor
from vapo_megatron.config import OptimizerConfig
from vapo_megatron.parallel.groups import Ranks
from vapo_megatron.parallel.matrix_weights import (
    Piece,
    Weight,
    initial_basis,
    pieces_of,
    put_rows,
    rows_of,
)
from vapo_megatron.parallel.owners import Item, owners

UPDATES: Mapping[str, Callable[..., None]] = {"dion": dion.dion_update, "muon": dion.muon_update}
GATHERED = 2**26
"""Most elements that one collective gathers from all replicas."""
STATE = "optimizer.state"
"""Of the names in a checkpoint."""
MOMENTUM, BASIS, MOMENTS = "momentum", "basis", ("exp_avg", "exp_avg_sq")
MAIN = "fp32_param"
"""As megatron-core names the float32 copies of bfloat16 parameters."""


class MatrixOptimizer(torch.optim.Optimizer):
    """The updates of what this rank owns.

    A group has `weights`, which describe its `params` (float32), and `method`.
    """

    def __init__(
        self, groups: list[dict[str, Any]], settings: OptimizerConfig, ranks: Ranks, seed: int
    ) -> None:
        """Take what is owned.

        Args:
            groups: one for each method and weight decay; parameters of matrices by layer.
            settings: of the updates; learning rates and decays are the groups'.
            ranks: those of tensor parallelism hold the columns of a matrix.
            seed: of the bases.
        """
        super().__init__(groups, {})
        self._settings, self._ranks, self._seed = settings, ranks, seed
        self.num_steps = 0
        """Updates made."""

    def make_state(self) -> None:
        """Initialize the state where there is none."""
        for group in self.param_groups:
            for main, weight in zip(group["params"], group["weights"], strict=True):
                state = self.state[main]
                if state:
                    continue
                names = MOMENTS if group["method"] == "adamw" else (MOMENTUM,)
                state.update({name: torch.zeros_like(main) for name in names})
                if group["method"] == "dion":
                    for index, part in enumerate(weight.parts):
                        basis = initial_basis(part, self.rank_of(part.shape), self._seed)
                        state[f"{BASIS}_{index}"] = basis.to(main.device)

    def rank_of(self, shape: Sequence[int]) -> int:
        """Return Dion's rank for a matrix."""
        return rank_of(shape, self._settings.matrix_rank_fraction)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update what is owned; gradients are in `grad`."""
        self.make_state()
        self.num_steps += 1
        for group in self.param_groups:
            if group["method"] == "adamw":
                self._step_adamw(group)
                continue
            members = zip(group["params"], group["weights"], strict=True)
            for _, of_layer in itertools.groupby(members, key=lambda member: member[1].layer):
                self._step_layer(list(of_layer), group)

    def _step_adamw(self, group: dict[str, Any]) -> None:
        mains = group["params"]
        if not mains:
            return
        s = self._settings
        first, second = ([self.state[main][name] for main in mains] for name in MOMENTS)
        adamw(
            mains, [main.grad for main in mains], first, second,
            max_exp_avg_sqs=[], state_steps=[torch.tensor(self.num_steps - 1.0) for _ in mains],
            # The fused one needs no temporaries.
            fused=mains[0].is_cuda, foreach=not mains[0].is_cuda, amsgrad=False, maximize=False,
            beta1=s.adam_beta1, beta2=s.adam_beta2, eps=s.adam_eps, lr=group["lr"],
            weight_decay=group["weight_decay"],
        )  # fmt: skip

    def _step_layer(self, members: list[tuple[Tensor, Weight]], group: dict[str, Any]) -> None:
        """Update the matrices of a layer, with the sharded dimension as their columns."""
        matrices, touched = [], []
        for main, weight in members:
            state = self.state[main]
            for index, part in enumerate(weight.parts):
                assert main.grad is not None
                tensors = main, main.grad, state[MOMENTUM]
                rows = [rows_of(tensor, part.runs) for tensor in tensors]
                basis = state.get(f"{BASIS}_{index}")
                rank = min(part.shape) if basis is None else basis.shape[1]
                factor = scale_factor(part.shape, rank, self._settings.matrix_scale)
                x, g, m = (each.T if weight.dim == 0 else each for each in rows)
                matrices.append(dion.Matrix(x, g, m, basis, factor))
                touched += [(main, part.runs, rows[0]), (state[MOMENTUM], part.runs, rows[2])]
        UPDATES[group["method"]](
            matrices, learning_rate=group["lr"], weight_decay=group["weight_decay"],
            momentum_factor=self._settings.matrix_momentum, sum_columns=self._sum_columns,
        )  # fmt: skip
        for tensor, runs, changed in touched:
            put_rows(tensor, runs, changed)

    def _sum_columns(self, tensors: list[Tensor]) -> None:
        if self._ranks.tp_size == 1:
            return
        flat = _flatten_dense_tensors(tensors)
        dist.all_reduce(flat, group=self._ranks.tp_group)
        for tensor, total in zip(tensors, _unflatten_dense_tensors(flat, tensors), strict=True):
            tensor.copy_(total)


class OwnedOptimizer:
    """What megatron-core's optimizers are to the trainer: gradients, a step, state to save."""

    def __init__(
        self,
        weights: Sequence[Weight],
        settings: OptimizerConfig,
        method: str,
        ranks: Ranks,
        config: Any,
        seed: int,
    ) -> None:
        """Find the owners, and copy in float32 what this rank owns.

        Args:
            weights: all of this rank's, in the model's order.
            settings: of the updates.
            method: of matrices, "dion" or "muon".
            ranks: where this rank stands.
            config: megatron-core's OptimizerConfig, whose clip_grad and weight_decay are read.
            seed: of Dion's bases.
        """
        self.config, self.method, self._ranks = config, method, ranks
        self._pieces = pieces_of(weights, ranks.replica_size)
        items = [
            Item(tuple(part.shape for part in p.weight.parts), p.of(p.weight.parameter).numel())
            for p in self._pieces
        ]
        self._owners = owners(items, method, settings.matrix_rank_fraction, ranks.replica_size)
        self.owned = [
            piece for piece, owner in zip(self._pieces, self._owners) if owner == ranks.replica_rank
        ]
        """Pieces of parameters that this rank updates."""
        self._mains = {piece: _main(piece) for piece in self.owned}
        self.optimizer = MatrixOptimizer(self._groups(settings), settings, ranks, seed)
        self.is_stub_optimizer = False

    def _groups(self, settings: OptimizerConfig) -> list[dict[str, Any]]:
        """Return groups as megatron-core has them: biases and norms do not decay."""
        matrices = [p for p in self.owned if p.weight.parts]
        matrices.sort(key=lambda piece: piece.weight.layer)
        others = [p for p in self.owned if not p.weight.parts]
        decayed = [p for p in others if p.weight.parameter.dim() > 1]
        plain = [p for p in others if p.weight.parameter.dim() == 1]
        table = (
            (matrices, self.method, settings.matrix_rate_factor, 1.0),
            (decayed, "adamw", 1.0, 1.0), (plain, "adamw", 1.0, 0.0),
        )  # fmt: skip
        return [
            {
                "params": [self._mains[piece] for piece in members],
                "weights": [piece.weight for piece in members],
                "method": method, "lr_mult": rate, "wd_mult": decay,
                "lr": 0.0, "weight_decay": 0.0,
            }
            for members, method, rate, decay in table
        ]  # fmt: skip

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of what this rank owns."""
        return self.optimizer.param_groups

    def init_state_fn(self, optimizer: MatrixOptimizer, config: Any) -> None:
        """Initialize the state where there is none."""
        optimizer.make_state()

    def get_parameters(self) -> list[Tensor]:
        """Return the float32 parameters that this rank owns."""
        return list(self._mains.values())

    def prepare_grads(self) -> bool:
        """Take the reduced gradients of what this rank owns."""
        for piece, main in self._mains.items():
            main.grad = piece.of(piece.weight.parameter.main_grad)  # type: ignore[attr-defined]
        return False

    def get_grad_norm(self) -> float:
        """Return the norm of the whole model's gradient, in which every element counts once."""
        gradients = [
            main.grad
            for piece, main in self._mains.items()
            if param_is_not_shared(piece.weight.parameter)
            and param_is_not_tensor_parallel_duplicate(piece.weight.parameter)
        ]
        return float(get_grad_norm_fp32(gradients, grad_stats_parallel_group=dist.group.WORLD))

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Update what this rank owns, and fetch what others have updated."""
        self.optimizer.step()
        for piece, main in self._mains.items():
            data = piece.of(piece.weight.parameter.data)
            if data.dtype != main.dtype:
                data.copy_(main)
        self._gather()
        return True

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for piece in self._pieces:
            piece.weight.parameter.grad = None
        for main in self._mains.values():
            main.grad = None

    def _gather(self) -> None:
        """Gather the updated parameters from their owners."""
        ranks = self._ranks
        if ranks.replica_size == 1:
            return
        by_owner: list[list[Tensor]] = [[] for _ in range(ranks.replica_size)]
        for piece, owner in zip(self._pieces, self._owners, strict=True):
            by_owner[owner].append(piece.of(piece.weight.parameter.data).view(-1))
        longest = max(sum(map(len, of_owner)) for of_owner in by_owner)
        size = max(1, GATHERED // ranks.replica_size)
        like = by_owner[0][0]
        for start in range(0, longest, size):
            length = min(size, longest - start)
            own = like.new_zeros(length)
            for part, at in _spans(by_owner[ranks.replica_rank], start, length):
                own[at : at + len(part)] = part
            found = like.new_empty(length * ranks.replica_size)
            dist.all_gather_into_tensor(found, own, group=ranks.replica_group)
            for owner, of_owner in enumerate(by_owner):
                for part, at in _spans(of_owner, start, length):
                    part.copy_(found[owner * length + at :][: len(part)])

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Describe what this rank saves, or loads: tensors by their names in the checkpoint."""
        return {
            "num_steps": self.optimizer.num_steps,
            "state": {_key(*of): described for of, described in self._saved().items()},
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what was loaded for sharded_state_dict."""
        self.optimizer.num_steps = int(state["num_steps"])
        for piece, name, index in self._saved():
            loaded, main = state["state"][_key(piece, name, index)], self._mains[piece]
            weight = piece.weight
            of_main = self.optimizer.state[main]
            if name == BASIS:
                for own, basis in zip(self._in_rows(weight, index), _bases(of_main, weight, index)):
                    basis.copy_(rows_of(loaded, own)[:, : basis.shape[1]])
            else:
                target = main if name == MAIN else of_main[name]
                target.chunk(weight.num_stacked)[index].copy_(loaded)

    def _saved(self) -> dict[tuple[Piece, str, int], ShardedTensor]:
        """Return what a checkpoint has of what this rank owns, by piece, name and stacked tensor.

        A basis has rows where the parameter has its sharded dimension, in the same order.
        """
        self.optimizer.make_state()
        found = {}
        for piece, main in self._mains.items():
            of_main, weight = self.optimizer.state[main], piece.weight
            tensors = {n: t for n, t in of_main.items() if not n.startswith(BASIS)}
            if weight.parameter.dtype != main.dtype:
                tensors[MAIN] = main
            for name, tensor in tensors.items():
                for index, part in enumerate(tensor.chunk(weight.num_stacked)):
                    described = self._described(piece, name, index, part.detach(), weight.dim)
                    found[piece, name, index] = described
            if f"{BASIS}_0" in of_main:
                for index in range(weight.num_stacked):
                    fused = self._fused(weight, of_main, index)
                    found[piece, BASIS, index] = self._described(piece, BASIS, index, fused, 0)
        return found

    def _in_rows(self, weight: Weight, index: int) -> list[Sequence[tuple[int, int]]]:
        """Return the rows of the bases of a stacked tensor."""
        if weight.num_stacked > 1 or weight.dim == 1:
            start, stop = weight.parts[index].bounds
            return [((0, stop - start),)]
        return [part.runs for part in weight.parts]

    def _fused(self, weight: Weight, state: Mapping[str, Tensor], index: int) -> Tensor:
        """Put the bases of a stacked tensor into one, in the parameter's order, zeros behind."""
        bases, rows = _bases(state, weight, index), self._in_rows(weight, index)
        size = sum(map(len, bases)), max(basis.shape[1] for basis in bases)
        fused = bases[0].new_zeros(size)
        for basis, runs in zip(bases, rows, strict=True):
            for run, own in zip(runs, basis.split([count for _, count in runs])):
                fused.narrow(0, *run)[:, : basis.shape[1]] = own
        return fused

    def _described(
        self, piece: Piece, name: str, index: int, tensor: Tensor, dim: int | None
    ) -> ShardedTensor:
        weight, ranks = piece.weight, self._ranks
        suffix = f".{index}" if weight.num_stacked > 1 else ""
        place = ranks.tp_rank * piece.count + piece.index, ranks.tp_size * piece.count
        # Replicas have none of it: its owner alone describes it.
        return ShardedTensor.from_rank_offsets(
            f"{STATE}.{name}.{weight.name}{suffix}", tensor,
            *([] if dim is None else [(dim, *place)]),
            replica_id=(int(weight.is_copy), ranks.tp_rank if dim is None else 0, 0),
            allow_shape_mismatch=weight.is_padded,
        )  # fmt: skip


def _key(piece: Piece, name: str, index: int) -> str:
    """Return a name of its own for each tensor that one rank saves."""
    return f"{name} {piece.weight.name} {index} {piece.index}"


def _bases(state: Mapping[str, Tensor], weight: Weight, index: int) -> list[Tensor]:
    which = [index] if weight.num_stacked > 1 else range(len(weight.parts))
    return [state[f"{BASIS}_{part}"] for part in which]


def _main(piece: Piece) -> Tensor:
    """Return what is updated: the parameter, or a float32 copy of it."""
    if piece.count == 1 and piece.weight.parameter.dtype == torch.float32:
        return piece.weight.parameter
    return piece.of(piece.weight.parameter.detach()).float()


def _spans(tensors: Sequence[Tensor], start: int, length: int) -> Iterator[tuple[Tensor, int]]:
    """Yield what [start, start + length) of flat tensors in a row has of each, and its place."""
    at = -start
    for tensor in tensors:
        first, last = max(0, -at), min(len(tensor), length - at)
        if first < last:
            yield tensor[first:last], at + first
        at += len(tensor)
