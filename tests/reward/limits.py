"""Limits that hold for some requests alone, so that a slow machine may take its time for others."""

from vapo_megatron.sandbox import pool

PATIENT_SECONDS = 600.0
BEGIN = pool._Worker.begin


def limit(monkeypatch, seconds, *names):
    """Let a request that contains one of the names have so many seconds, any other its time."""

    def limited(worker, task, message, timeout_seconds):
        is_limited = any(name.encode() in message for name in names)
        BEGIN(worker, task, message, seconds if is_limited else PATIENT_SECONDS)

    monkeypatch.setattr(pool._Worker, "begin", limited)
