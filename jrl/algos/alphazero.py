"""AlphaZero: a policy that learns to do what a search with the environment's own step finds (arXiv:1712.01815).

    algo = alphazero.make(alphazero.Config(), spec)
    act = algo.act_in(env)                                                        # env: jrl.types.JaxEnv
    out = act(algo.actor(state), obs, (), key, True, env_state)                   # searches from `env_state`
    state, aux = jax.jit(algo.update)(state, rollout, key)                        # rollout: jrl.types.Rollout [T, B]

Environments have one agent, or two agents that move in turn and whose rewards sum to 0. In a game one search serves
both: its values are those of the player that moves, so a change of the mover makes the discount negative. The player
that waits takes the last action, as `envs.board_games` and pgx define it. Without `env_state` the network acts alone.

    loss      -sum_a share(a) log pi(a | s) - ent_coef H(pi(. | s)) + vf_coef (V(s) - target)^2 / 2
    share     the search's improved policy; with `search.kind` puct the shares of its visits
    target    lambda return of the agent's own rewards; with gae_lambda 1 and gamma 1 the result of the game. Before a
              random move (`random_moves`) it ends with the search's value of that position

The player that waits learns the value of its observation, too. Gradients and metrics are averaged over
`make(..., axis_name="d")`; float hyper-parameters are leaves of Config.
"""

import functools
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from flax import struct

from jrl import spaces
from jrl.algos import actor_critic, custom_loss, parts, search
from jrl.algos import agent as agents
from jrl.algos.agent import ActorState, Agent, Common, MakeOptions, Records, State
from jrl.algos.exploration import OverDistributions, Stochastic
from jrl.algos.search import Search
from jrl.fields.bounds import Count, NonNegative, NonNegativeSchedule, Unit
from jrl.networks import NetworkConfig
from jrl.ops import returns, schedules
from jrl.ops.exploration import masked_logits
from jrl.types import (
    ActOut,
    Algo,
    Array,
    Discrete,
    EnvSpec,
    InputError,
    JaxEnv,
    Key,
    Metrics,
    PyTree,
    Rollout,
    UpdateAux,
    hyperparams,
)

DEFAULT_NETWORK = NetworkConfig()
SHARE = "search"  # key of a rollout's extras: the search's improved policy, [T, B, A] f32
VALUE = "search_value"  # key of a rollout's extras: the search's value of the position for each agent, [T, B] f32
RANDOM = "random_move"  # key of a rollout's extras: the move was drawn at random, for all agents, [T, B] bool


@hyperparams
class Config(Common):
    """Hyper-parameters of AlphaZero; a Schedule is a number or `[[env_steps, value], ...]`."""

    acts_in: ClassVar[Any] = Discrete
    has_memory: ClassVar[bool] = False
    searches_env: ClassVar[bool] = True

    lr: NonNegativeSchedule = 1e-3
    search: Search = Search()
    gae_lambda: Unit = 1.0  # lambda of the value's target; 1: the return to the end of the episode or rollout
    vf_coef: NonNegative = 1.0  # weight of the value loss
    # weight of the policy's entropy: keeps moves of equal value equally likely, so that self-play visits many positions
    ent_coef: NonNegative = 0.0
    random_moves: Unit = 0.0  # share of moves drawn uniformly from the allowed ones, so that self-play varies
    num_epochs: Count = 1  # passes over each rollout
    num_minibatches: Count = 8  # gradient steps per pass
    microbatch_size: Count | None = None  # rows whose gradient is computed at once; null: chosen for the device
    exploration: OverDistributions = Stochastic()

    def validate(self) -> list[str]:
        return search.reward_faults(self) + super().validate()


# ---------------------------------------------------------------- acting


class Node(NamedTuple):
    """States of G games in a tree."""

    env_state: PyTree  # leaves [G, ...]
    mover: Array  # [G] i32, index of the agent that moves
    ended: Array  # [G] bool, the episode has ended
    value: Array  # [G] f32, value of a node that has ended


def policy(cfg: Config, agent: Agent, actor: ActorState, obs: PyTree, memory: PyTree, explore: bool):
    """Returns the distribution of actions [B] of the network alone, and its probabilities in place of a search's."""
    dist, value, memory = agent.net.step(actor.params, obs, memory)
    extras = {SHARE: jax.nn.softmax(dist.logits), VALUE: value, RANDOM: jnp.zeros(value.shape, bool)}
    return dist, memory, extras


def act_in(cfg: Config, agent: Agent, env: JaxEnv):
    """Returns the function (actor, obs [B, *], carry, key, explore, env_state) -> ActOut, which searches in `env`.

    Raises:
      InputError: the environment has more than two agents, or two agents without an action mask.
    """
    num_agents, games = env.spec.num_agents, env.spec.games
    observer, wait = agent.observer, spaces.num_choices(agent.spec.action) - 1
    if num_agents > 2 or (num_agents == 2 and not observer.masks):
        raise InputError(
            f"algo.name alphazero: expected one agent, or two agents that move in turn and have an action_mask, got "
            f"{num_agents} agents: use ppo"
        )
    by_game = lambda tree: jax.tree.map(lambda x: x.reshape(games, -1, *x.shape[1:]), tree)
    of = lambda x, mover: jnp.take_along_axis(x.reshape(games, num_agents), mover[:, None], 1)[:, 0]

    def look(actor: ActorState, obs: PyTree) -> tuple[Array, Array, Array, Array | None]:
        """Returns the mover [G], and its logits [G, A], value [G] and allowed actions [G, A]."""
        obs, mover = observer.see(actor.obs_stats, obs), jnp.zeros((games,), jnp.int32)
        if num_agents > 1:
            mover = jnp.argmax(by_game(observer.mask(obs))[..., wait] == 0, 1).astype(jnp.int32)
            obs = jax.tree.map(lambda x: by_game(x)[jnp.arange(games), mover], obs)
        dist, value = agent.net.apply(actor.params, obs)
        return mover, dist.logits, value, observer.mask(obs)

    def all_agents(mover: Array, own: Array, other: Any) -> Array:
        """Returns [B, *]: `own` [G, *] for the agents that move, `other` [*] for those that wait."""
        is_mover = (mover[:, None] == jnp.arange(num_agents)[None]).reshape(games, num_agents, *[1] * (own.ndim - 1))
        return jnp.where(is_mover, own[:, None], other).reshape(env.spec.num_envs, *own.shape[1:])

    def act(actor: ActorState, obs: PyTree, carry: PyTree, key: Key, explore: bool, env_state: PyTree) -> ActOut:
        search.check_states("alphazero", env_state, games)

        def step(key: Key, action: Array, node: Node) -> search.Child:
            before = jax.tree.map(lambda x, like: x.reshape(like.shape), node.env_state, env_state)
            after, result = env.step(before, all_agents(node.mover, action, wait), key)
            mover, logits, value, _ = look(actor, result.obs)
            reward, terminated, truncated = (
                of(x, node.mover) for x in (result.reward, result.terminated, result.truncated)
            )
            # the environment resets after an end: below, a node keeps its value and earns nothing
            value = jnp.where(node.ended, node.value, jnp.where(terminated, 0.0, value))
            sign = jnp.where(mover == node.mover, 1.0, -1.0)
            discount = jnp.where(node.ended, 1.0, jnp.where(terminated, 0.0, sign * cfg.gamma))
            ended = node.ended | terminated | truncated
            reward = jnp.where(node.ended, 0.0, reward)
            return search.Child(reward, discount, logits, value, Node(by_game(after), mover, ended, value))

        mover, logits, value, allowed = look(actor, obs)
        node = Node(by_game(env_state), mover, jnp.zeros((games,), bool), value)
        blocked = None if allowed is None else ~allowed
        search_key, where_key, move_key = jax.random.split(key, 3)
        found = search.run(cfg.search, search_key, search.Root(logits, value, node), step, blocked, explore=explore)
        action, random = found.action, jnp.zeros((games,), bool)
        if explore:
            random = jax.random.bernoulli(where_key, cfg.random_moves, (games,))
            any_move = masked_logits(jnp.zeros_like(logits), allowed)
            action = jnp.where(random, jax.random.categorical(move_key, any_move).astype(jnp.int32), action)
        extras = {
            SHARE: all_agents(mover, found.share, jax.nn.one_hot(wait, found.share.shape[-1])),
            VALUE: all_agents(mover, found.value, -found.value[:, None]),
            RANDOM: jnp.repeat(random, num_agents),
        }
        seen = observer.record(actor.obs_stats, observer.see(actor.obs_stats, obs))
        return ActOut(all_agents(mover, action, jnp.int32(wait)), carry, {**extras, **seen})

    by_network = functools.partial(agents.act, cfg, agent, policy)

    def chosen(actor: ActorState, obs: PyTree, carry: PyTree, key: Key, explore: bool, env_state: PyTree) -> ActOut:
        if explore or cfg.search.in_evaluation:
            return act(actor, obs, carry, key, explore, env_state)
        return by_network(actor, obs, carry, key, explore)

    return chosen


# ---------------------------------------------------------------- learning


@struct.dataclass
class Rows:
    """One row per agent and environment step: [T, B, *] or [N, *]."""

    obs: PyTree  # normalised observations
    share: Array  # [N, A] f32, the search's improved policy
    chooses: Array  # f32, weight of the policy's loss: 0 where an agent waits for its turn, 1 on average
    target: Array  # f32, target of the value
    weight: Array  # f32, 0 on masked rows, 1 on average


def targets(cfg: Config, agent: Agent, state: State, rollout: Rollout) -> tuple[Rows, Metrics]:
    """Returns Rows [T, B], and metrics of the value."""
    value, done = actor_critic.values(agent, state, rollout)[0], rollout.terminated | rollout.truncated
    gae = {"gamma": cfg.gamma, "gae_lambda": cfg.gae_lambda}
    # steps after a random move are not those of the policy: the value of the search takes their place, like an end
    random = rollout.extras[RANDOM]
    reward = jnp.where(random, rollout.extras[VALUE], rollout.reward)
    _, target = returns.gae(reward, rollout.terminated | random, done | random, value, **gae)
    share, target = parts.zero_masked(rollout.mask, (rollout.extras[SHARE], target))
    obs, weight = agent.observer.recall(state.obs_stats, rollout), parts.weights(rollout.mask, agent.axis_name)
    chooses = actor_critic.choice(agent, obs)
    chooses = weight if chooses is None else parts.weights(rollout.mask & chooses, agent.axis_name)
    metrics = parts.value_metrics(target, value[:-1], weight, agent.axis_name)
    return Rows(obs, share, chooses, target, weight), metrics


def loss(cfg: Config, agent: Agent, params: PyTree, rows: Rows) -> tuple[Array, Metrics]:
    """Returns the mean loss over Rows [N], see the module, and metrics."""
    dist, value = agent.net.apply(params, rows.obs)
    mean = lambda x: jnp.mean(rows.weight * x)
    per_choice = lambda x: jnp.mean(rows.chooses * x)
    cross_entropy = per_choice(-jnp.sum(rows.share * jax.nn.log_softmax(dist.logits), -1))
    value_loss = mean(0.5 * (value - rows.target) ** 2)
    share_entropy = -jnp.sum(jax.scipy.special.xlogy(rows.share, rows.share), -1)
    entropy = per_choice(dist.entropy())
    metrics = {
        "loss/policy": cross_entropy,
        "loss/value": value_loss,
        "policy/entropy": entropy,
        "search/entropy": per_choice(share_entropy),
    }
    return cross_entropy - cfg.ent_coef * entropy + cfg.vf_coef * value_loss, metrics


def update(cfg: Config, agent: Agent, state: State, rollout: Rollout, key: Key) -> tuple[State, UpdateAux]:
    """Makes the epochs of minibatches on a rollout [T, B]."""
    first = agents.with_first_stats(agent, state, rollout)
    rows, value_metrics = targets(cfg, agent, first, rollout)
    grid = agents.grid(agent, *rows.weight.shape)
    chunk = agents.chunk(cfg, agent, rows.weight.size // cfg.num_minibatches)
    take, lr = agents.taker(agents.cut(agent, rows, ())), schedules.value(cfg.lr, state.env_steps)
    rows_loss = custom_loss.over_rows(agent.loss, functools.partial(loss, cfg, agent), agent.net)

    def step(carry, batch: Rows):
        params, opt_state = carry
        gradient, metrics = agents.mean_gradient(agent, rows_loss, params, batch, chunk)
        return agents.descend(cfg, agent, lr, gradient, opt_state, params), metrics

    start = (state.params, state.opt_state)
    (params, opt_state), metrics = agents.epochs(cfg, agent, step, start, take, grid, key)
    state = replace(state, params=params, opt_state=opt_state, updates=state.updates + 1)
    metrics = jax.tree.map(jnp.mean, metrics)
    return agents.observed(agent, state, rollout), UpdateAux(metrics | value_metrics | {"train/lr": lr})


def make(cfg: Config, spec: EnvSpec, network: NetworkConfig = DEFAULT_NETWORK, **options: Unpack[MakeOptions]) -> Algo:
    """Makes AlphaZero, an on-policy Algo. A user's loss gets Rows [N]. Arguments and errors: see `jrl.algos`."""
    search.import_mctx()  # only to raise its error now
    records = Records(seen=True)
    agent = agents.make(cfg, spec, network, actor_critic.networks, kind="distribution", records=records, **options)
    algo = agents.algo(
        cfg,
        agent,
        init=actor_critic.init,
        policy=policy,
        update=update,
        outputs=actor_critic.outputs,
        memory=agent.net.carry,
    )
    return algo._replace(act_in=functools.partial(act_in, cfg, agent))
