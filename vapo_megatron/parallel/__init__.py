"""Ranks: groups, schedules, collectives, optimizer, health; importing it prepares megatron-core."""

from vapo_megatron.parallel import environment, megatron_on_cpu

environment.set_defaults()
megatron_on_cpu.install()
