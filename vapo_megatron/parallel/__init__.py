"""All that knows megatron-core's parallelism; importing it readies megatron-core."""

from vapo_megatron.parallel import backend

backend.install()
