"""Everything built on megatron-core's parallelism; importing it prepares megatron-core."""

from vapo_megatron.parallel import environment, megatron_on_cpu

environment.set_defaults()
megatron_on_cpu.install()
