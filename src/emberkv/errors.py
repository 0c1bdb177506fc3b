"""The whole error taxonomy on one page.

Laws: a new type exists only if a caller acts on it differently. Outcomes (a miss, a refused put) are values, not
errors: see types.py. Every message is one line that says what to do.
"""

from __future__ import annotations


class EmberError(Exception):
    """Base of all errors raised by this package. The text is one line, fit for an operator."""


class ConfigError(EmberError):
    """The caller's or operator's fault: a bad value, file, or argument. The CLI exits with code 2."""


class ProtocolError(EmberError):
    """The peer's fault: a malformed or hostile frame. The connection is closed; nothing else is affected."""


class HandshakeRefused(EmberError):
    """The peer speaks to the wrong cluster, version, or tenant; retrying the same endpoint is useless."""


class Unavailable(EmberError):
    """Nobody's fault: a peer, file or coordinator cannot be reached now; try again or elsewhere."""


class NameInUse(ConfigError):
    """A node with this name is alive; start under another name or stop the other one."""


class CoordinatorError(Unavailable):
    """The coordinator did not answer in time, or its store cannot be used now."""


class StoreFull(CoordinatorError):
    """The store has reached its configured size: nothing was written; delete records or raise the size."""


class NotOurs(ConfigError):
    """A file or directory belongs to another cluster, format or store; it is never overwritten."""


class InvariantViolation(AssertionError):
    """Our own bug: a sum or state that must hold does not."""
