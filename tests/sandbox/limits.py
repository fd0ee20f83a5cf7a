"""Limits that hold for some requests alone, so that a slow machine may take its time for others."""

from vapo_megatron.sandbox.session_processes import Session

PATIENT_SECONDS = 600.0
BEGIN = Session.begin


def limit(monkeypatch, seconds, *names):
    """Let a request that contains one of the names have so many seconds, any other its time."""

    def limited(session, timeout_seconds):
        is_limited = any(name.encode() in session.request for name in names)
        BEGIN(session, seconds if is_limited else PATIENT_SECONDS)

    monkeypatch.setattr(Session, "begin", limited)
