"""Policies to export, and runs of exported policies."""

import importlib.util
import math
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np

from jrl.ops import normalize
from jrl.types import Box, EnvSpec

VECTOR = Box((4,))
NORMAL = Box((2,), "float32", -1.0, 1.0)
OWN = Box((2,), "float32", (-2.0, 0.0), (2.0, 1.0))  # actions of the environment; the policy's are in NORMAL
CONTINUOUS = EnvSpec(VECTOR, NORMAL, 1, None, OWN)


def trained(state):
    """Returns a state with large parameters, so that actions differ, and with observation statistics."""
    rng = np.random.default_rng(0)
    scale = lambda x: 0.02 if x.ndim < 2 else 0.5 / math.sqrt(math.prod(x.shape[:-1]))
    noisy = lambda x: np.asarray(x + scale(x) * rng.normal(size=x.shape).astype(x.dtype), x.dtype)
    state = state.replace(params=jax.device_put(jax.tree.map(noisy, jax.device_get(state.params))))
    if getattr(state, "obs_stats", ()) != ():
        seen = rng.normal(2.0, 3.0, (100, *state.obs_stats.mean.shape)).astype(np.float32)
        state = state.replace(obs_stats=jax.jit(normalize.update)(state.obs_stats, seen))
    return state


def load(directory):
    spec = importlib.util.spec_from_file_location("policy", directory / "policy.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.load(directory)


def run_bare(blocked, *directories):
    command = [sys.executable, "-I", str(Path(__file__).with_name("bare.py")), blocked, *map(str, directories)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
