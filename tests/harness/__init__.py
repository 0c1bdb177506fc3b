"""Deterministic worlds for tests of the core: nothing here knows a socket, a thread or the wall clock."""
