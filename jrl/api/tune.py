"""`import jrl.api.tune` gives `jrl.rllib.tune`."""

import sys

from jrl.rllib import tune

sys.modules[__name__] = tune
