"""`python -m emberkv.demo`."""

import sys

from emberkv.demo.run import from_arguments

if __name__ == "__main__":
    sys.exit(from_arguments(sys.argv[1:]))
