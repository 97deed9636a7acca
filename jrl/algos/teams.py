"""Q-learning of a team: a network shared by all agents, and the mixer of their values (VDN, QMIX).

The network returns Q values of each agent's actions from the agent's observation. The mixer computes the value of the
joint action from the values of the agents' actions:

    mixer sum    Q_tot = sum_i Q_i(o_i, a_i)                                          VDN, arXiv:1706.05296
    mixer qmix   Q_tot = |w2(s)| . elu(|W1(s)| Q + b1(s)) + v(s)                      QMIX, arXiv:1803.11485
                 with weights from hypernetworks of the state s

Both increase with each Q_i, so the best joint action consists of each agent's best action: acting needs neither mixer
nor state. An agent that is not `present` has the value 0. With a core each agent has its own memory.

    net = networks(cfg, observer, network)                   # cfg: a Config with the fields of Mixing and a `mixer`
    outputs = concatenate_heads(net.apply(params, obs))      # [..., A * n + W]
    by_agent(agent, outputs), best(agent, outputs, mask)     # [..., A, n] and [..., A] i32
    taken(cfg, agent, outputs, action)                       # Q_tot [...]

`jrl.algos.vdn` learns from replay with these functions, `jrl.algos.pqn` from rollouts.
"""

import math
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import Interval

from jrl import networks as nets
from jrl import spaces
from jrl.algos.agent import Agent
from jrl.algos.exploration import by_choice
from jrl.algos.observer import Observer
from jrl.networks import Head, Network, NetworkConfig
from jrl.networks.dense import dense, layer
from jrl.networks.encoders import flattened
from jrl.ops import exploration as ops
from jrl.spaces import AGENTS, PRESENT, STATE
from jrl.types import (
    Array,
    Dict,
    Discrete,
    EnvSpec,
    InputError,
    Key,
    MultiDiscrete,
    PyTree,
    Space,
    Window,
    hyperparams,
)


@hyperparams
class Mixing:
    """Hyper-parameters of a mixer."""

    mixer_embed: Annotated[int, Interval(ge=1, le=65_536)] = 32  # width of QMIX's hidden layer
    hypernet_hidden: Annotated[int, Interval(ge=0, le=65_536)] = 64  # hidden width of its hypernetworks; 0: no layer
    agent_id: bool = True  # for teams: the network reads the agent's index, one-hot


# ---------------------------------------------------------------- the team


class Team(NamedTuple):
    """Sizes and observation space of a team."""

    size: int  # A, number of agents
    num_actions: int  # n, actions of each agent
    agent: Space  # observation space of each agent


def is_team(spec: EnvSpec) -> bool:
    """Returns whether the spaces of a spec are those of a team, as `jrl.envs.team` makes them."""
    named = dict(spec.observation.items) if isinstance(spec.observation, Dict) else {}
    return isinstance(spec.action, MultiDiscrete) and AGENTS in named and PRESENT in named


def team_of(spec: EnvSpec, name: str = "a mixer") -> Team:
    """Returns the Team of a spec.

    Args:
      spec: spec of a team (`jrl.envs.team`).
      name: algorithm or option that needs a team, for the error.
    Raises:
      InputError: the spaces are not those of a team.
    """
    action, observation = spec.action, spec.observation
    named = dict(observation.items) if isinstance(observation, Dict) else {}
    if isinstance(action, MultiDiscrete) and len(set(action.nvec)) == 1 and AGENTS in named:
        size = len(action.nvec)
        if (agent := spaces.unstack_space(named[AGENTS], size)) is not None:
            return Team(size, action.nvec[0], agent)
    if AGENTS in named:
        raise InputError(
            f"{name} acts for a team whose agents have Discrete actions, not the joint action {action}: use ppo, a2c, "
            "impala or appo, or for a Box sac or td3"
        )
    raise InputError(
        f"{name} acts for a team of agents, not for a single agent: join the agents of an environment by "
        "multi_agent.group, or use dqn, or pqn without a mixer, for each agent"
    )


# ---------------------------------------------------------------- the network


def networks(cfg: Any, observer: Observer, network: NetworkConfig) -> Network:
    """Returns a network with the heads `q` [A * n] and, with mixer qmix, `mix` [W], QMIX's weights; see `mix`.

    Parameters are a dict with `agents` and, with qmix, `mixer`. Memory is [B, A, ...].
    """
    spec = observer.spec
    team = team_of(spec)
    size, num_actions = team.size, team.num_actions
    own = dict(team.agent.items) if isinstance(team.agent, Dict) else {"obs": team.agent}
    alone = Dict((*own.items(), ("agent_id", Discrete(size)))) if cfg.agent_id else team.agent
    base = nets.build(
        EnvSpec(alone, Discrete(num_actions), spec.num_envs),
        replace(network, shared=True),
        {"q": Head(num_actions)},
    )
    qmix = cfg.mixer == "qmix"
    mixer = _hypernetworks(cfg, spec, network, size) if qmix else None

    def init(key: Key) -> PyTree:
        if mixer is None:
            return {"agents": base.init(key)}
        keys = jax.random.split(key)
        return {"agents": base.init(keys[0]), "mixer": mixer.init(keys[1])}

    def agent_obs(obs: PyTree, lead: int) -> PyTree:
        """Returns each agent's observation [..., A, *], after `lead` leading axes."""
        x = obs[AGENTS]
        split = lambda leaf, x: x.reshape(*x.shape[:lead], size, *leaf.shape)
        x = spaces.map_leaves(split, team.agent, x)
        if not cfg.agent_id:
            return x
        shape = jax.tree.leaves(x)[0].shape[: lead + 1]
        ids = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), shape)
        return {**(x if isinstance(team.agent, Dict) else {"obs": x}), "agent_id": ids}

    def heads(params: PyTree, obs: PyTree, q: Array) -> tuple[Array, ...]:
        """Returns the heads for q [..., A, n]; values of absent agents become 0."""
        if PRESENT in obs:
            q = jnp.where(obs[PRESENT][..., None] != 0, q, 0.0)
        lead = q.shape[:-2]
        flat = q.reshape(*lead, size * num_actions)
        return (flat,) if mixer is None else (flat, mixer.apply(params["mixer"], obs).reshape(*lead, -1))

    fold = lambda tree: jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)
    unfold = lambda tree: jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), tree)

    def carry(batch_size: int) -> PyTree:
        return unfold(base.carry(batch_size * size))

    def apply(params, obs, *names, key=None):
        if isinstance(obs, Window):
            return unroll(params, obs)[0]
        axes = len(spaces.batch_shape(spec.observation, obs))
        return heads(params, obs, base.apply(params["agents"], agent_obs(obs, axes))[0])

    def step(params, obs, carry, *names, key=None):
        (q,), carry = base.step(params["agents"], fold(agent_obs(obs, 1)), fold(carry))
        return heads(params, obs, unfold(q)), unfold(carry)

    def unroll(params, window: Window, *names, key=None):
        rows, length = window.reset.shape
        by_stream = lambda x: jnp.swapaxes(x, 1, 2).reshape(rows * size, length, *x.shape[3:])
        streams = Window(
            jax.tree.map(by_stream, agent_obs(window.obs, 2)),
            fold(window.carry),
            jnp.repeat(window.reset, size, axis=0),
        )
        (q,), carry = base.unroll(params["agents"], streams)
        q = jnp.swapaxes(q.reshape(rows, size, length, num_actions), 1, 2)
        return heads(params, window.obs, q), unfold(carry)

    return Network(init, apply, carry, step, unroll)


class _Mixer(NamedTuple):
    init: Any  # key -> params
    apply: Any  # (params, obs [..., *]) -> [N, W]


def _hypernetworks(cfg: Any, spec: EnvSpec, network: NetworkConfig, size: int) -> _Mixer:
    """Returns QMIX's hypernetworks, from the state (or all observations without a state) to the weights of `mix`."""
    assert isinstance(spec.observation, Dict)
    named = dict(spec.observation.items)
    name = STATE if STATE in named else AGENTS
    read = lambda obs: flattened(named[name], network, obs[name])
    one = spaces.map_leaves(lambda leaf: jnp.zeros((1, *leaf.shape), leaf.dtype), named[name])
    inputs = jax.eval_shape(read, {name: one}).shape[-1]
    embed, hidden = cfg.mixer_embed, cfg.hypernet_hidden
    # output -> the widths of its layers
    deep = (hidden,) if hidden else ()
    shapes = {"w1": (*deep, size * embed), "b1": (embed,), "w2": (*deep, embed), "v": (embed, 1)}

    def init(key: Key) -> PyTree:
        params = {}
        for name, widths in shapes.items():
            key, *keys = jax.random.split(key, 1 + len(widths))
            ins = (inputs, *widths[:-1])
            params[name] = [layer(k, a, b) for k, a, b in zip(keys, ins, widths, strict=True)]
        return params

    def apply(params: PyTree, obs: PyTree) -> Array:
        state, out = read(obs), {}
        for name, layers in params.items():
            x = dense(layers[0], state)
            for next_layer in layers[1:]:
                x = dense(next_layer, jax.nn.relu(x))
            out[name] = x
        return jnp.concatenate([out[name] for name in shapes], -1)

    return _Mixer(init, apply)


def mix(cfg: Any, q: Array, weights: Array) -> Array:
    """Returns Q_tot, which increases with each agent's value (arXiv:1706.05296, eq. 2; 1803.11485, section 4.1).

    Args:
      q:       [..., A] f32, values of the agents' actions.
      weights: [..., W] f32, outputs of the hypernetworks, A * E + E + E + 1; [..., 0] for mixer sum.
    Returns:
      [...] f32.
    """
    if cfg.mixer == "sum":
        return q.sum(-1)
    size, embed = q.shape[-1], cfg.mixer_embed
    w1, b1, w2, v = jnp.split(weights, [size * embed, (size + 1) * embed, (size + 2) * embed], -1)
    w1 = jnp.abs(w1).reshape(*q.shape, embed)
    hidden = jax.nn.elu(jnp.sum(q[..., None] * w1, -2) + b1)
    return jnp.sum(hidden * jnp.abs(w2), -1) + v[..., 0]


# ---------------------------------------------------------------- readers of the outputs


def concatenate_heads(heads: Any) -> Array:
    """Returns all heads in one array [..., A * n + W]."""
    return jnp.concatenate(heads, -1)


def by_agent(agent: Agent, outputs: Array) -> Array:
    """Returns the agents' Q values [..., A, n] from concatenated heads."""
    team = team_of(agent.observer.spec)
    return outputs[..., : team.size * team.num_actions].reshape(*outputs.shape[:-1], team.size, team.num_actions)


def taken(cfg: Any, agent: Agent, outputs: Array, action: Array) -> Array:
    """Returns Q_tot [...] of actions [..., A]."""
    q = by_agent(agent, outputs)
    chosen = jnp.sum(jax.nn.one_hot(action, q.shape[-1]) * q, -1)
    return mix(cfg, chosen, outputs[..., math.prod(q.shape[-2:]) :])


def best(agent: Agent, outputs: Array, mask: Array | None) -> Array:
    """Returns each agent's best action [..., A] among those that the mask [..., A * n] allows."""
    q = by_agent(agent, outputs)
    return ops.masked_argmax(q, by_choice(mask, q))
