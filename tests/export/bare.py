"""Run as `python -I bare.py BLOCKED DIRECTORY...`: acts with exported policies without the modules `BLOCKED`.

Reads obs.npy beside each directory (its name with .obs.npy) and writes the actions for batches of 32 to .32.npy, and
for one observation at a time to .1.npy.
"""

import importlib.util
import sys
from pathlib import Path

import numpy as np

blocked, *directories = sys.argv[1:]


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked.split(","):
            raise ImportError(f"{name} is blocked")


sys.meta_path.insert(0, Blocker())
for name in blocked.split(","):
    try:
        __import__(name)
    except ImportError:
        continue
    raise SystemExit(f"{name} could be imported")

for directory in map(Path, directories):
    spec = importlib.util.spec_from_file_location("policy", directory / "policy.py")
    policy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(policy)
    pi = policy.load()
    obs = np.load(directory.with_suffix(".obs.npy"))
    batched = np.concatenate([pi.act(obs[i : i + 32]) for i in range(0, len(obs), 32)])
    np.save(directory.with_suffix(".32.npy"), batched)
    np.save(directory.with_suffix(".1.npy"), np.stack([pi.act(one) for one in obs]))
