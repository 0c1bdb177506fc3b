"""Stress with real threads, processes and memory: what the simulator, which has one thread and no memory, cannot see.

Laws: every byte that a reader was promised must belong to the pattern of one key and one counter (pattern.py), at every
moment of the promise. An oracle that never failed is unproven, so test_oracle.py and test_broken_nodes.py break
arenas, pins and writes on purpose. Nothing here measures time; a wait only has a bound so that a hang is an end.
Longer runs: EMBERKV_STRESS_S=60 pytest tests/stress makes every storm run for 60 seconds.
"""
