"""GPUs, interconnects and storage: data-sheet figures, and the share of them that is achieved.

Every default is a published figure, chosen before it was used for a prediction; none is fitted to a
job. One set serves all jobs and GPUs; what that costs is plan.PUBLISHED_OVER_PREDICTED.

    peaks        NVIDIA's data sheets: H100 SXM 989 TFLOP/s in bfloat16 without sparsity, 3.35 TB/s,
                 NVLink 900 GB/s (both directions), PCIe 5 x16 64 GB/s per direction; A100 SXM 312,
                 2.039, 600, and PCIe 4 with 32; GB200 NVL72 per GPU 2500 (half of the sparse
                 5000), 8, 1800, and to the CPU NVLink-C2C with 900 GB/s for two GPUs; H20 148, 4,
                 900, as its sellers state; B200 (DGX B200 user guide: 1,440 GB, NVLink 14.4 TB/s
                 and 8 ConnectX-7 for 8 GPUs) 2250, 8, 1800, PCIe 5; B300 (DGX B300: 2.3 TB, 8
                 ConnectX-8 of 800 Gb/s) 2250, 8, 1800, and PCIe 5, which its Xeon 6776P have
    network      one 400 Gb/s adapter per GPU (NVIDIA DGX H100), 50 GB/s per direction; 200 Gb/s in
                 a DGX A100
    float32      outside tensor cores, dense TFLOP/s: A100 19.5, H100 and H200 67, H20 44, B200 75
                 (HGX B200: 600 for 8), GB200 80 (NVL72: 5,760), B300 as B200
    matmul       .80: 792.1 of 989 TFLOP/s, the best shape on H100 (S. Bekman, Machine Learning
                 Engineering, "Maximum Achievable Matmul FLOPS")
    attention    .55: between FlashAttention-2's 35 % and FlashAttention-3's best 75 % on H100
                 (arXiv 2407.08608, abstract)
    memory       .87: 2903 of 3350 GB/s (aigatech/vpbenchmarking, 32 H100)
    decoding     .60: achieved bandwidth for weights and KV cache over peak, 2 H100 (Databricks,
                 "LLM Inference Performance Engineering", figure 3)
    NVLink       .82: 370 of 450 GB/s (NCCL's maintainers, NVIDIA/nccl-tests issue 212)
    network      .81: 323.5 of 400 GB/s, all-gather of 32 H100 (aigatech/vpbenchmarking)
    PCIe         .73: 46.8 of 64 GB/s, device to host, the slower direction (the same)
    latency      10 us per collective: 6 us between 2 H100, more between more (NVIDIA/nccl 1259)
    decode step  5 ms of host time per step: the lower end of 5 to 13 (vLLM RFC 6854)
    storage      an assumption; replace it with your own figure

Shares were measured on H100 and are assumed to be the same on other GPUs.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from vapo_megatron.planning.flops import BF16_PEAK_FLOPS

GB = 1e9


def _gpu(
    name: str,
    memory_gb: int,
    memory: float,
    nvlink: float,
    network: float,
    pcie: float,
    float32: float,
) -> dict[str, Any]:
    return {
        "gpu_bytes": memory_gb * 10**9,
        "peak_tflops": BF16_PEAK_FLOPS[name] / 1e12,
        "float32_tflops": float32,
        "memory_gb_per_second": memory,
        "nvlink_gb_per_second": nvlink,
        "network_gb_per_second": network,
        "pcie_gb_per_second": pcie,
    }


GPUS = {
    "A100": _gpu("A100", 80, 2039, 600, 25, 32, 19.5),
    "H100": _gpu("H100", 80, 3350, 900, 50, 64, 67),
    "H200": _gpu("H200", 141, 4800, 900, 50, 64, 67),
    "H20": _gpu("H20", 96, 4000, 900, 50, 64, 44),
    "GB200": _gpu("GB200", 186, 8000, 1800, 50, 225, 80),
    "B200": _gpu("B200", 180, 8000, 1800, 50, 64, 75),
    "B300": _gpu("B300", 288, 8000, 1800, 100, 64, 75),
}
"""Fields of Cluster that a GPU's data sheet states."""


@dataclasses.dataclass(frozen=True)
class Cluster:
    """What a job runs on: peaks and the share of each that is reached; bandwidths are per GPU."""

    num_gpus: int
    gpus_per_node: int = 8
    gpu_bytes: int = 80 * 10**9
    peak_tflops: float = 989.0
    """Dense bfloat16, without sparsity."""
    float32_tflops: float = 67.0
    """Outside tensor cores."""
    matmul_share: float = 0.80
    attention_share: float = 0.55
    memory_gb_per_second: float = 3350.0
    memory_share: float = 0.87
    decode_share: float = 0.60
    nvlink_gb_per_second: float = 900.0
    """Both directions together, as NVIDIA states it: half of it per direction."""
    nvlink_share: float = 0.82
    network_gb_per_second: float = 50.0
    """Per direction, with one adapter per GPU as in NVIDIA's DGX of that GPU."""
    network_share: float = 0.81
    pcie_gb_per_second: float = 64.0
    """Per direction: half of what NVIDIA states."""
    pcie_share: float = 0.73
    storage_gb_per_second: float = 20.0
    """Write bandwidth of the whole job."""
    collective_seconds: float = 10e-6
    decode_step_seconds: float = 5e-3
    layer_host_seconds: float = 2.1e-3
    """What the host takes to start the kernels of a layer's forward pass, whatever their size:
    measured on an H200 with Transformer Engine's layers and without CUDA graphs (docs/gpu.md)."""

    def rate(
        self,
        of: Literal[
            "matmul", "float32", "attention", "memory", "decode", "nvlink", "network", "pcie"
        ],
    ) -> float:
        """Return what is reached: FLOP/s of products and attention, else bytes/s per direction.

        "memory" is a GPU's, "decode" the same while weights and KV cache are read; "nvlink" is
        within a node, "network" between nodes, "pcie" between a GPU and its host.
        """
        peaks = {
            "matmul": self.peak_tflops * 1e12,
            "float32": self.float32_tflops * 1e12,
            "attention": self.peak_tflops * 1e12,
            "memory": self.memory_gb_per_second * GB,
            "decode": self.memory_gb_per_second * GB,
            "nvlink": self.nvlink_gb_per_second / 2 * GB,
            "network": self.network_gb_per_second * GB,
            "pcie": self.pcie_gb_per_second * GB,
        }
        share: float = getattr(self, f"{'matmul' if of == 'float32' else of}_share")
        return peaks[of] * share

    def at_peak(self) -> Cluster:
        """Return the same with every peak reached."""
        names = [f.name for f in dataclasses.fields(self) if f.name.endswith("_share")]
        shares: dict[str, Any] = dict.fromkeys(names, 1.0)
        return dataclasses.replace(self, **shares)

    def ring_bytes(self, size: int, stride: int = 1) -> float:
        """Bytes/s per direction and GPU in a ring of `size` ranks that are `stride` apart.

        Within a node that is NVLink's. Across nodes, a ring enters and leaves each node through the
        adapters of all its members in that node.
        """
        if self.gpus_per_node % (size * stride) == 0:
            return self.rate("nvlink")
        members = min(size, max(1, self.gpus_per_node // stride))
        return min(self.rate("nvlink"), members * self.rate("network"))

    def all_gather_seconds(self, num_bytes: float, size: int, stride: int = 1) -> float:
        """Time of an all-gather or reduce-scatter; `num_bytes` is the size of the full tensor."""
        if size == 1:
            return 0.0
        return (size - 1) / size * num_bytes / self.ring_bytes(size, stride)

    def neighbour_bytes(self, size: int, stride: int) -> float:
        """Bytes/s per direction to the next of `size` ranks that are `stride` apart."""
        within = self.gpus_per_node % (size * stride) == 0
        return self.rate("nvlink") if within else self.rate("network")
