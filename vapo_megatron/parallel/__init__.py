"""Everything built on megatron-core's parallelism; importing it prepares megatron-core."""

from vapo_megatron.parallel import megatron_on_cpu

megatron_on_cpu.install()
