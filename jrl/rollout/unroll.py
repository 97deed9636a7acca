"""Collection inside a program: T steps of policy and JAX environments.

unroll = make(env, act, length=128)
state = unroll.init(key)
state, rollout, episodes = jax.jit(unroll.step)(state, actor, key)
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jrl import spaces
from jrl.envs import limits
from jrl.metrics import episodes
from jrl.ops import scans
from jrl.types import (
    ActOut,
    Algo,
    Array,
    EnvSpec,
    Episodes,
    InputError,
    JaxEnv,
    Key,
    PyTree,
    Rollout,
    Several,
)

_FEW_ENVS = 16  # most environments whose step takes about as long as the loop around it, on a CPU
RAW_STEPS = "record"  # key of a rollout's extras: step results before any transform of the learner, see `finish`


@struct.dataclass
class UnrollState:
    """State of B environments between two rollouts. Arrays only, so that it can be saved, sharded and vmapped."""

    env_state: PyTree
    obs: PyTree  # [B, *]
    done: Array  # [B] bool, the next step resets
    started: Array  # [B] bool, the next rollout continues the previous one
    carry: PyTree  # recurrent state [B, ...]
    columns: episodes.EpisodeState


class Unroll(NamedTuple):
    # `vector` is the index of this vector of environments; used if `make` got `place`
    init: Callable[..., UnrollState]  # (key, vector=0)
    step: Callable[..., tuple[UnrollState, Rollout, Episodes]]  # (state, actor, key, vector=0)
    pure: bool = True  # see JaxEnv.pure


def make(
    env: JaxEnv,
    act: Callable[..., ActOut],
    *,
    length: int,
    carry: Callable[..., PyTree] = lambda batch_size: (),
    place: int | None = None,
    reward_transform: Callable[[Array], Array] | None = None,
    running_return_gamma=None,
    explore: bool = True,
    window: int = episodes.WINDOW,
    restart: bool = False,
    cut: bool = True,
    record: bool = False,
    count_agents: bool = False,
    packs: bool = False,
    act_in: Callable[[JaxEnv], Callable[..., ActOut]] | None = None,
) -> Unroll:
    """Builds the two functions that run `act` in `env`.

    Args:
      env: B environments.
      act: `Algo.act`.
      length: T, steps per rollout.
      carry: `Algo.carry`, the recurrent state at an episode's start.
      place: number of environments of all vectors, if `carry` depends on the environment's index; None: it does not.
      reward_transform: reward [T, B] -> reward for the learner; episode statistics use the raw reward.
      running_return_gamma: `Algo.running_return_gamma`.
      explore: passed to `act`.
      window: number of latest episodes in the report.
      restart: whether each rollout begins new episodes in all environments; their tasks stay.
      cut, record, count_agents: see `finish`.
      packs: whether the loop stacks few arrays, see `jrl.ops.scans.pack`; results differ by rounding.
      act_in: `Algo.act_in`, which then acts in place of `act`; None: `act` acts.
    Raises:
      InputError: host environments, a traced length, or environments that cannot restart inside a program.
    """
    if not isinstance(env, JaxEnv):
        raise InputError(
            f"unroll.make: expected a JaxEnv, got {type(env).__name__}, which is stepped from the host: make it with "
            'backend="jax", or collect with jrl.rollout.sources.make'
        )
    if isinstance(length, jax.core.Tracer):
        raise InputError("length: expected a whole number, got a traced array: make one program for each length")
    if restart and not env.pure:
        raise InputError(
            "restart: expected environments that a program can reset, got EnvPool's: step them from the host"
        )
    num_envs = env.spec.num_envs
    search = None if act_in is None else act_in(env)
    is_small = num_envs <= _FEW_ENVS and env.pure and jax.default_backend() == "cpu"

    def initial(vector) -> PyTree:
        return carry(num_envs) if place is None else carry(num_envs, first=vector * num_envs, total=place)

    @functools.partial(jax.jit, inline=True)  # one program instead of ten if called from the host
    def at_start(vector) -> tuple[Array, Array, PyTree, episodes.EpisodeState]:
        done, started = (jnp.zeros((num_envs,), bool) for _ in range(2))  # two buffers, because each is donated
        return done, started, initial(vector), episodes.init(num_envs, window, agents=len(env.spec.agents))

    def init(key: Key, vector=0) -> UnrollState:
        env_state, obs = env.reset(key)
        return UnrollState(env_state, obs, *at_start(vector))

    def restarted(state: UnrollState, key: Key, vector) -> UnrollState:
        new = init(key, vector)
        env_state = new.env_state
        if env.set_task is not None and env.get_task is not None:
            env_state = env.set_task(env_state, env.get_task(state.env_state))
        return dataclasses.replace(new, env_state=env_state, columns=episodes.clear_running(state.columns))

    def step(state: UnrollState, actor: PyTree, key: Key, vector=0):
        if restart:
            key, reset_key = jax.random.split(key)
            state = restarted(state, reset_key, vector)
        initial_carry = initial(vector)

        def body(loop, keys):
            env_state, obs, reset, memory = loop
            if search is None:
                out = act(actor, obs, memory, keys[0], explore)
            else:
                out = search(actor, obs, memory, keys[0], explore, env_state)
            env_state, result = env.step(env_state, out.action, keys[1])
            row = (obs, out.action, result.reward, result.terminated, result.truncated, ~reset, out.extras)
            begins = reset if result.several is None else reset | result.several.absent
            begins = begins if result.failed is None else begins | result.failed
            memory = reset_where(begins, initial_carry, out.carry)
            done = result.terminated | result.truncated
            found = (row, result.several, result.failed)
            return (env_state, result.obs, done, memory), scans.pack(found) if packs else found

        loop = (state.env_state, state.obs, state.done, state.carry)
        scan = scans.small if is_small else jax.lax.scan
        loop, out = scan(body, loop, jax.random.split(key, (length, 2)))
        rows, several, failed = scans.unpack(out) if packs else out
        env_state, obs, done, memory = loop
        columns, rollout, report = finish(
            state.columns,
            rows,
            obs,
            state.carry,
            state.started,
            failed,
            several,
            reward_transform=reward_transform,
            gamma=running_return_gamma,
            cut=cut,
            record=record,
            count_agents=count_agents,
            bootstraps=env.spec.bootstraps,
        )
        if failed is not None:
            report = dataclasses.replace(report, nonfinite=failed.sum(dtype=jnp.int32))
        return UnrollState(env_state, obs, done, jnp.ones_like(done), memory, columns), rollout, report

    return Unroll(init, step, env.pure)


def rollout_like(spec: EnvSpec, algo: Algo, *, length: int, num_envs: int, record: bool = False) -> Rollout:
    """Returns shapes and dtypes of the rollouts [T, B] for `algo`; `record`: see `finish`."""
    rows = lambda x: jax.ShapeDtypeStruct((length, *x.shape), x.dtype)
    scalar: Any = lambda dtype: jax.ShapeDtypeStruct((length, num_envs), jnp.dtype(dtype))
    obs = spaces.elements(spec.observation, spaces.columns(spec._replace(num_envs=num_envs)))

    def first(key: Key):
        carry = algo.carry(num_envs)
        return algo.act(
            algo.actor(algo.init(key)), jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), obs), carry, key
        )

    out = jax.eval_shape(first, jax.random.key(0))
    extras = {name: jax.tree.map(rows, x) for name, x in out.extras.items()}
    if algo.running_return_gamma is not None:
        extras["running_return"] = scalar("float32")
    no = scalar(bool)
    if record:
        floats = {name: scalar("float32") for name in ("reward", "episode_return")}
        extras[RAW_STEPS] = {**floats, "length": scalar("int32"), "terminated": no, "truncated": no, "failed": no}
    contiguous: Any = jax.ShapeDtypeStruct((num_envs,), jnp.dtype(bool))
    action = jax.tree.map(rows, out.action)
    over: Any = jax.ShapeDtypeStruct((length, num_envs // len(spec.agents)), jnp.dtype(bool)) if spec.agents else None
    return Rollout(
        jax.tree.map(rows, obs), obs, action, scalar("float32"), no, no, no, contiguous, extras, out.carry, over=over
    )


def reset_where(reset, initial: PyTree, carry: PyTree) -> PyTree:
    """Returns the recurrent state after a step: the initial state if the step was masked as a reset."""
    pick = lambda new, old: jnp.where(jnp.expand_dims(reset, tuple(range(1, old.ndim))), new, old)
    return jax.tree.map(pick, initial, carry)


def finish(
    columns,
    rows,
    last_obs,
    carry,
    contiguous,
    failed=None,
    several: Several | episodes.FinishedGames | None = None,
    *,
    reward_transform,
    gamma,
    cut: bool = True,
    record: bool = False,
    count_agents: bool = False,
    bootstraps: bool | None = None,
) -> tuple[episodes.EpisodeState, Rollout, Episodes]:
    """Makes a Rollout of recorded rows, and the report on its episodes; used by all collectors.

    Args:
      columns: episode statistics before the rollout.
      rows: (obs, action, reward, terminated, truncated, mask, extras), each [T, B, ...]; mask is False on resets and on
        empty rows.
      last_obs, carry, contiguous: see Rollout.
      failed: [T, B] bool, rows on which the environment failed and was replaced: they are masked, and the statistics
        ignore their episodes. None: no failures and no empty rows.
      several: results of multi-agent environments, leaves [T, ...]: rows of absent agents are masked, too. Told if the
        columns of a game's agents are not side by side; the learner counts game steps by `extras[COUNTS_STEP]`.
      reward_transform, gamma: see `make`.
      cut: whether to set `truncated` on a row without an end before a masked row. Its next observation belongs to the
        same episode, so that bootstrapping from it is correct.
      record: whether to add `extras[RAW_STEPS]`: `reward`, `terminated`, `truncated` and `failed` of each step before
        any change for the learner, and `episode_return` and `length` of its episode including the step; [T, B] each.
        With `count_agents` also `over` of its game.
      count_agents: whether to count steps of agents instead of environments (`Rollout.over` is then None).
      bootstraps: see `EnvSpec.bootstraps`.
    """
    obs, action, reward, terminated, truncated, mask, extras = rows
    done = ended = terminated | truncated
    own = {"terminated": terminated, "truncated": truncated}
    if (for_learner := limits.flags(bootstraps)) is not None:
        terminated, truncated = for_learner(terminated, truncated)
    if failed is not None:
        contiguous = contiguous & ~(failed[0] & mask[0])  # a failed reset is still the reset after an end
    together = several if isinstance(several, Several) else None
    nobody = [x for x in (failed, None if together is None else together.absent) if x is not None]
    if nobody:
        empty = functools.reduce(jnp.logical_or, nobody)
        mask = mask & ~empty
        ended = done | empty  # on a masked row nothing is counted, but the sums are reset
        if cut:
            short = mask[:-1] & ~mask[1:] & ~done[:-1]
            truncated = truncated | jnp.concatenate([short, jnp.zeros_like(mask[:1])])
    learned = reward if reward_transform is None else reward_transform(reward)
    columns, tracked = episodes.track(columns, reward, ended, mask, gamma, learned)
    over = None
    if together is not None:
        over = None if count_agents else together.over
        ends = together.over if failed is None else together.over | failed.reshape(*together.over.shape, -1).any(-1)
        columns, report = episodes.reduce_games(columns, tracked, reward, ended, mask, ends)
    elif isinstance(several, episodes.FinishedGames):
        columns, report = episodes.reduce_finished(columns, tracked, ended, mask, several)
    else:
        columns, report = episodes.reduce(columns, tracked, ended, mask)
    if several is not None and count_agents:
        assert isinstance(report.agents, Episodes)
        report = dataclasses.replace(report, steps=report.agents.steps.sum(dtype=jnp.int32))
    if gamma is not None:
        extras = {**extras, "running_return": tracked.running_return}
    if record:
        broken = jnp.zeros_like(mask) if failed is None else failed
        recorded = {"reward": reward, "episode_return": tracked.episode_return, "length": tracked.length}
        if together is not None and count_agents:
            recorded["over"] = jnp.repeat(together.over, mask.shape[1] // together.over.shape[1], axis=1)
        extras = {**extras, RAW_STEPS: {**recorded, **own, "failed": broken}}
    rollout = Rollout(obs, last_obs, action, learned, terminated, truncated, mask, contiguous, extras, carry, over=over)
    return columns, rollout, report
