"""Facts about an environment, measured by a few seconds of random actions.

    facts = inspect_in_child(EnvConfig(id="CartPole-v1"))   # {"action": "discrete", "steps_per_s": 310000, ...}

The child process keeps jax unstarted in this process, and survives an environment that crashes. Run as a module it is
that child: it reads the section `env` as JSON, and prints the facts as JSON.
"""

import dataclasses
import json
import os
import subprocess
import sys
import time
from typing import Any

from jrl.errors import InputError
from jrl.fields import schema
from jrl.fields.env import EnvConfig

_ENVS = 8  # environments that are stepped side by side
_SECONDS = 3.0  # duration of random play, unless enough episodes have ended before
_EPISODES = 32
_LEAST_STEPS = 50
_CHECKED_STEPS = 100  # steps of `check_env` in the user's own environments
_MOST_SECONDS = 300.0  # for the child to import, make the environments, compile and step
_SPARSE = 0.05  # rewards are sparse if at most this share of the steps has another reward than most steps
_SMALL_INTEGERS = 32  # images of uint8 below this value have symbols, not pixels
_ERROR = "error: "  # prefix of the child's messages for the user
_SAMPLES = 2_000  # vector steps whose observations are measured


def inspect_in_child(env: EnvConfig, most_seconds: float = _MOST_SECONDS) -> dict[str, Any]:
    """Returns the facts of `inspect`, measured in a child process.

    Raises:
      InputError: the environment cannot be made or stepped, fails its checks, or is too slow to inspect.
    """
    command = [sys.executable, "-m", "jrl.auto.facts"]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    given = json.dumps(schema.plain(env))
    slow = f"env.id {env.id}: inspecting it takes more than {most_seconds:.0f} s"
    fix = f"choose the settings yourself, as in `jrl train --algo ppo --env {env.id} --stop env_steps=100000`"
    try:
        child = subprocess.run(
            command, input=given, env=variables, capture_output=True, text=True, timeout=most_seconds
        )
    except subprocess.TimeoutExpired:
        raise InputError(f"{slow}: {fix}") from None
    lines = child.stderr.strip().splitlines() or [f"exit status {child.returncode}"]
    if child.returncode == 2 and (errors := [line[len(_ERROR) :] for line in lines if line.startswith(_ERROR)]):
        raise InputError(*errors)
    if child.returncode:
        raise InputError(f"env.id {env.id}: inspecting it failed: {lines[-1][:300]}: {fix}")
    facts: dict[str, Any] = json.loads(next(line for line in reversed(child.stdout.splitlines()) if line[:1] == "{"))
    return facts


def inspect(env: EnvConfig, seconds: float = _SECONDS) -> dict[str, Any]:
    """Steps an environment with random actions and returns what the rules read.

    The user's own classes and functions (`package.module:name`) are checked first, as by `jrl check-env`.

    Args:
      env: section `env`; its `num_envs` is not used.
      seconds: limit of the random play.
    Returns:
      Facts by name, numbers, texts and bools only; docs/auto.md explains them.
    Raises:
      InputError: the environment cannot be made or stepped, or fails its checks.
    """
    import jax
    import numpy as np

    from jrl.envs import backends
    from jrl.envs.checker import check_env, random_action
    from jrl.envs.make import goal_reward, make
    from jrl.spaces import ACTION_MASK, by_kind, masks_actions, parts_by_kind
    from jrl.types import JaxEnv

    backend = backends.resolve(env.id, env.backend)
    if ":" in env.id and backends.suite_of(env.id) is None:
        settings: dict[str, Any] = {"options": env.options, "action_mask_info": env.action_mask_info}
        if problems := check_env(env.id, backend=backend, steps=_CHECKED_STEPS, **settings).problems:
            prefix = f"env.id {env.id}: "
            raise InputError(*(prefix + text.removeprefix(prefix) for text in problems))
    made: Any = make(dataclasses.replace(env.waiting(_ENVS), remote_worker_envs=False), host=True)
    spec, in_jax, key = made.spec, isinstance(made, JaxEnv), jax.random.key(0)
    step, rng = jax.jit(made.step) if in_jax else made.step, np.random.default_rng(0)
    state, obs = jax.jit(made.reset)(key) if in_jax else (None, made.reset())
    columns, agents = spec.num_envs, spec.num_agents
    rewards: list[np.ndarray] = []
    samples: list[Any] = []
    step_seconds: list[float] = []
    lengths: list[int] = []  # one per ended episode
    returns: list[float] = []
    running, length, limits = np.zeros(columns), np.zeros(columns, int), 0
    fresh = np.zeros(columns, bool)  # environments whose step is a reset
    count, began = 0, time.perf_counter()
    while count < _LEAST_STEPS or (time.perf_counter() - began < seconds and len(lengths) < _EPISODES * agents):
        parts = parts_by_kind(spec, jax.tree.map(np.array, obs))
        masks = [p[ACTION_MASK] != 0 if masks_actions(k) else None for k, p in zip(by_kind(spec), parts, strict=True)]
        if count < _SAMPLES:
            samples.append(parts[0])
        action = random_action(spec, rng, count + 2, masks)  # from its third step on actions are not the extremes
        start = time.perf_counter()
        if in_jax:
            state, result = jax.block_until_ready(step(state, action, jax.random.fold_in(key, count)))
        else:
            result = step(action)
        step_seconds.append(time.perf_counter() - start)
        count += 1
        obs, reward = result.obs, np.array(result.reward, np.float64)
        idle = fresh if result.several is None else fresh | np.array(result.several.absent)
        rewards.append(reward[~idle])
        running, length = running + reward, length + ~idle
        ended = np.array(result.terminated) | np.array(result.truncated)
        limits += int((np.array(result.truncated) & ended).sum())
        lengths += length[ended].tolist()
        returns += running[ended].tolist()
        running, length, fresh = np.where(ended, 0, running), np.where(ended, 0, length), ended
    made.close()
    each = np.concatenate(rewards)
    values, counts = np.unique(each.round(9), return_counts=True)
    is_sparse = len(values) > 1 and 1 - counts.max() / max(1, len(each)) <= _SPARSE
    limit = spec.max_episode_steps
    return {
        "backend": backend,
        "device": jax.default_backend(),
        "steps_per_s": round(spec.games / float(np.median(step_seconds))),  # the first step compiles
        "agents": agents,
        **_spaces(spec),
        "goals": not spec.agents and goal_reward(env) is not None,
        **_observations(by_kind(spec)[0], samples),
        "limit": limit,
        "length": round(float(np.mean(lengths)), 1) if lengths else limit or count,
        "ends_early": round(1 - limits / len(lengths), 3) if lengths else 0.0,
        "reward": "constant" if len(values) < 2 else "sparse" if is_sparse else "dense",
        "reward_std": float(f"{each.std():.3g}"),
        "return": float(f"{np.mean(returns) * agents:.4g}") if returns else None,
    }


def _spaces(spec: Any) -> dict[str, Any]:
    """Returns facts of the spaces, of the first kind of agents."""
    import numpy as np

    from jrl.networks.encoders import is_image
    from jrl.spaces import ACTION_MASK, by_kind, leaves, masks_actions, num_choices
    from jrl.types import Box, Dict, Discrete, MultiDiscrete, Tuple

    first = by_kind(spec)[0]
    action, observation = first.action, [(path, x) for path, x in leaves(first.observation) if path != ACTION_MASK]
    match action:
        case Discrete():
            kind, size = "discrete", action.n
        case Box():
            kind, size = "continuous", int(np.prod(action.shape))
        case MultiDiscrete():
            kind, size = "multi-discrete", num_choices(action)
        case Dict() | Tuple():
            kind, size = "mixed", len(leaves(action))
        case _:
            kind, size = "binary", int(np.prod(action.shape))
    return {
        "action": kind,
        "actions": size,
        "mask": masks_actions(first),
        "observation": "image" if any(is_image(x) for _, x in observation) else "vector",
        "arrays": len(observation),
        "elements": int(sum(np.prod(x.shape) for _, x in observation)),
    }


def _observations(first: Any, samples: list[Any]) -> dict[str, Any]:
    """Returns facts of the observed values, of arrays of floats that are not images, and of images of uint8."""
    import jax
    import numpy as np

    from jrl.networks.encoders import is_image
    from jrl.spaces import ACTION_MASK, leaves

    largest, brightest = 0.0, 0
    deviations: list[float] = []
    arrays = [jax.tree.leaves(one) for one in samples]
    for i, (path, leaf) in enumerate(leaves(first.observation)):
        if path == ACTION_MASK:
            continue
        if is_image(leaf):
            if leaf.dtype == "uint8":
                brightest = max(brightest, int(max(one[i].max() for one in arrays)))
        elif np.issubdtype(np.dtype(leaf.dtype), np.floating):
            x = np.concatenate([one[i].reshape(len(one[i]), -1) for one in arrays])
            largest = max(largest, float(np.percentile(np.abs(x), 99)))
            deviations += x.std(0).tolist()
    varying = [x for x in deviations if x > 1e-6]
    return {
        "floats": bool(deviations),
        "obs_largest": float(f"{largest:.3g}"),
        "obs_smallest_std": float(f"{min(varying):.3g}") if varying else 1.0,
        "symbols": 0 < brightest < _SMALL_INTEGERS,
    }


def _main() -> int:
    from jrl.envs.make import section
    from jrl.host import command
    from jrl.run import build

    given = json.loads(sys.stdin.read())
    build.enable_compile_cache()
    try:
        facts = inspect(section(given.pop("id"), **given))
    except InputError as e:
        return command.report_input_error(e)
    print(json.dumps(facts))
    return 0


if __name__ == "__main__":
    sys.exit(_main())
