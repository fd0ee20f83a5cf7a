"""How a job is split over ranks, and that as the configuration's parallel section."""

from __future__ import annotations

from typing import Any, NamedTuple


class Layout(NamedTuple):
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    dp: int = 1
    cp: int = 1
    ep: int = 1
    sp: bool = False
    distributed: bool = False
    overlap: bool = False
    recompute: str = "none"
    """Or a method and a number of layers, such as block 1."""
    dtype: str = "float32"
    budget: int = 2000
    """Tokens of a microbatch."""
    split: tuple = ()
    """[data-parallel rank][microbatch][response]; empty: all responses are one microbatch."""

    def __str__(self) -> str:
        defaults = self._field_defaults
        return ", ".join(f"{n}={v}" for n, v in self._asdict().items() if v != defaults[n]) or "one"

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp * self.cp


def parallel_fields(layout: Layout, **more: Any) -> dict[str, Any]:
    """Fields of the parallel section; more: in place of the layout's."""
    method, _, num_layers = layout.recompute.partition(" ")
    recompute: dict[str, Any] = {"recompute": method}
    if num_layers:
        recompute = {"recompute_method": method, "recompute_num_layers": int(num_layers)}
        recompute["recompute"] = "full"
    return {
        "world_size": layout.world_size,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "sequence_parallel": layout.sp,
        "use_distributed_optimizer": layout.distributed,
        "overlap_grad_reduce": layout.overlap,
        "overlap_param_gather": layout.overlap and layout.distributed,
        **recompute,
        **more,
    }
