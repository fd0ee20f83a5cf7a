"""All that knows megatron-core's parallelism; importing it readies megatron-core."""

from vapo_megatron.parallel import megatron_on_cpu

megatron_on_cpu.install()
