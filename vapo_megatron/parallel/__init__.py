"""All that knows megatron-core's parallelism; importing it readies megatron-core for this machine."""

from vapo_megatron.parallel import backend

backend.install()
