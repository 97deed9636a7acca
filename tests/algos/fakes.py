"""Data for algorithms without an environment: random observations, ends and masks under the contract, real extras.

`data` gives what an algorithm learns from: a Rollout, or a Batch for those that learn from replay or from a data set.
"""

import dataclasses
import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from cases import CASES
from jax.sharding import PartitionSpec as P

from jrl import algos
from jrl.algos import distill
from jrl.envs import team
from jrl.fields.data import RETURN_TO_GO, TIMESTEP, DataSets, learns_from, traits
from jrl.fields.hyper import Gru
from jrl.learn import parallel
from jrl.networks import NetworkConfig
from jrl.replay import ring, sequences
from jrl.rollout import unroll
from jrl.types import (
    NEXT_ACTION,
    Batch,
    Box,
    Dict,
    Discrete,
    EnvSpec,
    JaxEnv,
    MultiBinary,
    MultiDiscrete,
    Rollout,
    StepResult,
    element,
)

VECTOR = Box((4,))
BOX = Box((3,), low=-1.0, high=1.0)
NETWORK = NetworkConfig(hidden=(8, 8))


def in_teams(name):
    """Whether an algorithm acts for teams alone."""
    return algos.get_config_class(name).in_teams


def from_data(name):
    """Returns whether an algorithm learns from nothing but a data set."""
    return learns_from(algos.get_config_class(name)) is DataSets


def has_teacher(name):
    """Returns whether an algorithm learns from the labels of a trained policy, and not from rewards."""
    return algos.get_config_class(name).has_teacher


def has_members(name):
    """Returns whether an algorithm learns from a population, whose members act without noise."""
    return traits(algos.get_config_class(name)).has_members


def searches(name):
    """Returns whether an algorithm learns from searches, and acts by them."""
    cfg = algos.get_config_class(name)()
    return hasattr(cfg, "search") or traits(cfg).searches_env


def acts_in(name, kind):
    """Whether an algorithm acts in spaces of this kind, whatever it observes."""
    return issubclass(kind, algos.get_config_class(name).acts_in) and not in_teams(name)


def plays_for_a_return(name):
    """Whether an algorithm is told the return to come, of which it takes off what it receives."""
    return RETURN_TO_GO in traits(config(name)).reads


def observes(name, observation):
    """The space of what an algorithm has to see to see `observation`."""
    if not plays_for_a_return(name):
        return observation
    own = observation.items if isinstance(observation, Dict) else (("obs", observation),)
    return Dict((*own, ("prev_reward", Box(()))))


def spec(action=None, observation=VECTOR, num_envs=8, name="ppo"):
    """Of an algorithm for teams, a team of two agents of three actions, who observe `observation`."""
    if in_teams(name):
        return EnvSpec(team.joint_observation(observation, 2), action or MultiDiscrete((3, 3)), num_envs)
    some = Discrete(3) if acts_in(name, Discrete) else Box((2,), low=-1.0, high=1.0)
    return EnvSpec(observes(name, observation), action or some, num_envs)


def config(name, **overrides):
    return algos.get_config_class(name)(**{**CASES[name].small, **overrides})


def make(name, env_spec=None, network=NETWORK, *, axis_name=None, loss=None, **overrides):
    cfg, env_spec = config(name, **overrides), env_spec or spec(name=name)
    own = {"teacher": teacher(env_spec)} if has_teacher(name) else {}
    return algos.get(name).make(cfg, env_spec, network, axis_name=axis_name, loss=loss, **own)


@functools.cache
def teacher(env_spec):
    """A policy away from its start, that reads all of the observation and remembers."""
    algo = algos.get("ppo").make(config("ppo"), env_spec, NetworkConfig(hidden=(8,), core=Gru(size=6)))
    return distill.Teacher(algo, algo.actor(perturbed(made_up_state(algo, seed=5))), env_spec)


def learn(algo):
    """(state, data, key) -> (state, aux): all that comes of new data."""
    ingest = algo.ingest if algo.on_policy and algo.ingest else lambda state, rollout: state
    return lambda state, data, key: algo.update(ingest(state, data), data, key)


@functools.cache
def _updating(module, env_spec, network, constants):
    make = lambda cfg: module.make(dataclasses.replace(cfg, **dict(constants)), env_spec, network)
    return jax.jit(lambda cfg, *args: make(cfg).update(*args))


def update(module, cfg, env_spec, network, state, data, key, **constants):
    """(State, UpdateAux) of one update: one program for all values of the floats of `cfg` but for `constants`."""
    run = _updating(module, env_spec, network, tuple(constants.items()))
    return run(jax.tree.map(jnp.float32, cfg), state, data, key)


def observations(rng, space, batch):
    """[*batch, *space.shape] of the space's dtype, of a Dict by name."""
    if isinstance(space, Dict):
        return {name: observations(rng, part, batch) for name, part in space.items}
    if isinstance(space, MultiBinary):
        return rng.integers(0, 2, (*batch, *space.shape)).astype(space.dtype)
    if isinstance(space, Discrete):
        return rng.integers(0, space.n, batch).astype(np.int32)
    if isinstance(space, MultiDiscrete):
        return rng.integers(0, space.nvec, (*batch, len(space.nvec))).astype(np.int32)
    if space.dtype == "uint8":
        return rng.integers(0, 256, (*batch, *space.shape)).astype(np.uint8)
    return (2.0 + 3.0 * rng.normal(size=(*batch, *space.shape))).astype(np.float32)


def told(rng, shape):
    """What data sets tell beside transitions, by name."""
    to_go, step = rng.normal(size=shape), rng.integers(0, 50, shape)
    return {RETURN_TO_GO: jnp.asarray(to_go, jnp.float32), TIMESTEP: jnp.asarray(step, jnp.int32)}


def flags(rng, T, B, end_rate=0.25):
    """(terminated, truncated, mask) [T, B]: no end on a reset row; some first rows are reset rows."""
    terminated, truncated, mask = (np.zeros((T, B), bool) for _ in range(3))
    done = rng.random(B) < end_rate
    for t in range(T):
        mask[t] = ~done
        end = ~done & (rng.random(B) < end_rate)
        terminated[t] = end & (rng.random(B) < 0.5)
        truncated[t] = end & ~terminated[t]
        done = end
    return terminated, truncated, mask


@functools.cache
def _unroll_act(act):
    """Jitted once per algorithm: the steps of a rollout as a batch axis of `lax.map`."""

    @jax.jit
    def run(actor, obs, key, carry):
        def step(carry, row):
            out = act(actor, row[0], carry, row[1])
            return out.carry, (out.action, out.extras)

        return jax.lax.scan(step, carry, (obs, jax.random.split(key, len(jax.tree.leaves(obs)[0]))))[1]

    return run


def rollout(algo, env_spec, actor, *, T=8, seed=0):
    """A Rollout whose actions and extras come from `algo.act`."""
    rng, B = np.random.default_rng(seed), env_spec.num_envs
    seen = observations(rng, env_spec.observation, (T + 1, B))
    last_obs, obs = part(seen, -1), jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[:-1]), seen)
    action, extras = _unroll_act(algo.act)(actor, obs, jax.random.key(seed), algo.carry(B))
    terminated, truncated, mask = flags(rng, T, B)
    reward = np.where(mask, rng.normal(size=(T, B)), 0).astype(np.float32)
    if algo.running_return_gamma is not None:
        extras = {**extras, "running_return": jnp.asarray(rng.normal(size=(T, B)), jnp.float32)}
    if not algo.on_policy:
        extras = {**extras, **told(rng, (T, B))}
    return Rollout(
        obs=obs,
        last_obs=jax.tree.map(jnp.asarray, last_obs),
        action=action,
        reward=jnp.asarray(reward),
        terminated=jnp.asarray(terminated),
        truncated=jnp.asarray(truncated),
        mask=jnp.asarray(mask),
        contiguous=jnp.asarray(np.full(B, seed > 0)),
        extras=extras,
        carry=algo.carry(B),
    )


def actions(rng, space, batch):
    """[*batch, *space.shape] of the space's dtype, each as likely as any other; normal where a Box has no bounds."""
    if not isinstance(space, Box):
        return observations(rng, space, batch)
    low, high = space.bounds()
    if not (np.isfinite(low) & np.isfinite(high)).all():
        return rng.normal(size=(*batch, *space.shape)).astype(np.float32)
    return rng.uniform(low, high, (*batch, *space.shape)).astype(np.float32)


def batch(algo, env_spec, actor, *, N=64, seed=0):
    """A Batch of any actions, where some are forbidden those of `algo.act`, which would have to be compiled.

    A quarter of its rows are void. Behind two thirds the data go on.
    """
    rng = np.random.default_rng(seed)
    obs, next_obs = (jax.tree.map(jnp.asarray, observations(rng, env_spec.observation, (N,))) for _ in range(2))
    if isinstance(obs, dict) and "action_mask" in obs:
        step = jax.tree.map(lambda x: np.asarray(x)[None], obs)
        taken = np.asarray(_unroll_act(algo.act)(actor, step, jax.random.key(seed), algo.carry(N))[0])[0]
    else:
        taken = actions(np.random.default_rng(seed + 100), env_spec.action, (N,))
    weight = rng.uniform(0.5, 1.5, N) * (rng.random(N) > 0.25)
    return Batch(
        obs=obs,
        action=jnp.asarray(taken),
        reward=jnp.asarray(rng.normal(size=N), jnp.float32),
        discount=jnp.asarray(0.97 * (rng.random(N) > 0.2), jnp.float32),
        next_obs=next_obs,
        weight=jnp.asarray(weight / weight.mean(), jnp.float32),
        index=jnp.asarray(rng.integers(0, 1000, N), jnp.int32),
        extras={
            NEXT_ACTION: {"action": jnp.asarray(np.roll(taken, 1, 0)), "valid": jnp.asarray(rng.random(N) > 0.33)},
            **told(rng, N),
        },
    )


def data(algo, env_spec, actor, *, seed=0, T=8):
    """What `algo.update` learns from."""
    if algo.on_policy:
        return rollout(algo, env_spec, actor, T=T, seed=seed)
    return batch(algo, env_spec, actor, seed=seed, N=8 * T)


STEPS, COLUMNS = 8, 4


def world(env_spec, end_rate=0.2):
    """Observations, rewards and ends at random, under the contract; where an episode ends, no action is allowed."""
    B = env_spec.num_envs

    def observe(key, end):
        keys = iter(jax.random.split(key, 8))
        obs = jax.tree.map(
            lambda x: jax.random.normal(next(keys), (B, *x.shape)).astype(x.dtype), element(env_spec.observation)
        )
        if isinstance(env_spec.observation, Dict) and "action_mask" in obs:
            choices = obs["action_mask"].shape[1]
            allowed = jax.random.bernoulli(next(keys), 0.6, (B, choices)).at[:, 1::3].set(True)
            obs["action_mask"] = jnp.where(end[:, None], 0, allowed).astype(jnp.int8)
        return obs

    def step(done, action, key):
        keys = jax.random.split(key, 4)
        end = jax.random.bernoulli(keys[0], end_rate, (B,)) & ~done
        limit = jax.random.bernoulli(keys[1], 0.5, (B,))
        reward = jnp.where(done, 0.0, jax.random.normal(keys[2], (B,)))
        return end, StepResult(observe(keys[3], end), reward, end & ~limit, end & limit)

    start = jnp.zeros((B,), bool)
    return JaxEnv(env_spec, lambda key: (start, observe(key, start)), step)


def rollouts(algo, env_spec, actor, count=2, explore=True, seed=3):
    """Consecutive ones of `world`; the same environments and keys for every algorithm."""
    key = jax.random.key(seed)
    source = unroll.make(world(env_spec), algo.act, length=STEPS, carry=algo.carry, explore=explore)
    state, made = jax.jit(source.init)(key), []
    step = jax.jit(source.step)
    for i in range(count):
        state, rollout, _ = step(state, actor, jax.random.fold_in(key, i))
        if not algo.on_policy:
            rollout = rollout.replace(extras={**rollout.extras, **told(np.random.default_rng(i), rollout.reward.shape)})
        made.append(rollout)
    assert all(not np.asarray(rollout.mask).all() for rollout in made)
    return made


def drawn(algo, env_spec, actor, batch_size=8, *, burn_in=2, length=6):
    """What `algo.update` learns from, with memory too: the second of two rollouts, or what replay draws of both."""
    made = rollouts(algo, env_spec, actor)
    if algo.on_policy:
        return made[1]
    kinds = {"obs": element(env_spec.observation), "action": element(env_spec.action)}
    sizes = {"capacity": 200, "num_envs": env_spec.num_envs, "batch_size": batch_size, "gamma": 0.9, "n_step": 2}
    sizes["next_action"] = True

    def kept(*names):  # those that there are: a data set has no carry
        found = {n: x for n, x in made[0].extras.items() if n in (*names, RETURN_TO_GO, TIMESTEP)}
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), found)

    if algo.sequences:
        buffer = sequences.make(**kinds, **sizes, length=length, burn_in=burn_in, extras=kept("carry"))
    else:
        buffer = ring.make(**kinds, **sizes, extras=kept())

    @jax.jit
    def sample(made, key):
        state = buffer.init()
        for rollout in made:
            state = buffer.add(state, rollout)
        return buffer.sample(state, key)

    return sample(made, jax.random.key(9))


def per_device(data, devices):
    """Columns or rows split along a new leading axis of devices."""

    def split(spec, leaf):
        at = 1 if spec == parallel.ROLLOUT.obs else 0
        shape = (*leaf.shape[:at], devices, -1, *leaf.shape[at + 1 :])
        return np.moveaxis(np.asarray(leaf).reshape(shape), at, 0)

    return jax.tree.map(
        lambda spec, part: jax.tree.map(functools.partial(split, spec), part),
        parallel.ROLLOUT if isinstance(data, Rollout) else parallel.PER_DEVICE,
        data,
        is_leaf=lambda x: isinstance(x, P),
    )


@functools.lru_cache(maxsize=4)
def _others(init):
    """(a program of all that `init` makes but kernels, what it finds while it is traced: the tree and its kernels)."""
    found = {}

    def run(key):
        leaves, found["tree"] = jax.tree_util.tree_flatten_with_path(init(key))
        drawn = [path[0].name.endswith("params") and getattr(path[-1], "key", "") == "kernel" for path, _ in leaves]
        found["kernels"] = [(str(path[1:]), x.shape) if own else None for (path, x), own in zip(leaves, drawn)]
        return [x for (_, x), own in zip(leaves, drawn) if not own]

    return jax.jit(run), found


def made_up_state(algo, seed=0):
    """A State that no run begins with: of `algo.init` but for its kernels, normal numbers that numpy draws.

    To draw them is most of what `init` compiles. Copies of parameters are copies. Tests of first weights and of
    learning call `algo.init`.
    """
    run, found = _others(algo.init)
    rest = iter(run(jax.random.key(seed)))

    def kernel(name, shape):
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        gain = 0.01 if "policy_head" in name else 1.0  # a policy begins nearly uniform
        return jnp.asarray(gain * rng.normal(size=shape) / np.sqrt(shape[-2]), jnp.float32)

    return jax.tree.unflatten(found["tree"], [kernel(*of) if of else next(rest) for of in found["kernels"]])


def perturbed(state, scale=0.3):
    """The state with noise on its parameters: away from the nearly uniform first policy."""
    leaves, treedef = jax.tree.flatten(state.params)
    rng = np.random.default_rng(0)
    noisy = [jnp.asarray(np.asarray(x) + (scale * rng.normal(size=x.shape)).astype(x.dtype)) for x in leaves]
    return state.replace(params=jax.tree.unflatten(treedef, noisy))


def assert_same(a, b, err=""):
    """Bit for bit."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b)):
        x, y = np.asarray(x), np.asarray(y)
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_array_equal(x, y, err_msg=err + jax.tree_util.keystr(path))


def assert_close(a, b, atol=1e-5, rtol=1e-5):
    """But for what rounding has lost of a sum, which is another in another order."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b)):
        if "_rest" in jax.tree_util.keystr(path):
            continue
        np.testing.assert_allclose(x, y, atol=atol, rtol=rtol, err_msg=jax.tree_util.keystr(path))


def differ(a, b):
    return any(not np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def part(tree, i):
    """Row i of every leaf, on the host."""
    return jax.tree.map(lambda x: np.asarray(x)[i], tree)
