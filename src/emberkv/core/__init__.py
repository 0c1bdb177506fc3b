"""The pure core: decides, never does. Imports L0 only; no clock, chance, socket, thread or disk."""
