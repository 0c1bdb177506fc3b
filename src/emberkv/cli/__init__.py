"""The command line: what an operator types. Every failure is one line and an exit code (main.py)."""
