"""Everything that knows megatron-core's parallelism. Importing it prepares megatron-core for this machine."""

from vapo_megatron.parallel import backend

backend.install()
