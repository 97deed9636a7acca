"""`python -m jrl.migrate`, the same as `python -m jrl.config migrate`."""

import sys

from jrl.host import command
from jrl.rllib.migration import main

if __name__ == "__main__":
    sys.exit(command.run(main))
