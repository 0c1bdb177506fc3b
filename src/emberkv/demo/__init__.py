"""`emberkv demo`: a real model served from a real three-node cache, one of whose nodes is killed.

Why it exists: a promise about failures is believed when it is watched, with numbers measured in the same run.
Laws: nothing is faked. Engines and nodes are real processes; every figure comes from this run; a shortfall is said in
    one line and ends the demo with a non-zero exit code. No process, socket or directory stays behind.
Limits: one machine, Linux. `run.main` is the door; the other files are one part each:

    run (the straight line)  scenes_fill, scenes_loss, scenes_damage, scenes_freeze (what happens)  stage (who is on it)
    engine, writer (child processes)  children (talking to them)  texts (what the sessions say)
    probe (looking at one node)  corrupt (flipping a byte)  outage (from acks to an outage)
    report (figures and verdict)  page, plots (HTML)  screen (the terminal)
"""
