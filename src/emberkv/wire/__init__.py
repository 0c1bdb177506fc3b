"""The wire room: bytes <-> messages (codec) and the handshake (session), both without I/O.

Why it exists: every byte that comes from outside is bounded and checked here, before any other room sees it.
Laws: sans-IO; imports L0 only; the only error that a peer's bytes can cause is ProtocolError.
"""
