"""Parallelised Q-network: Q-learning from rollouts, without replay and without target network (arXiv:2407.04811).

    algo = pqn.make(pqn.Config(), spec)
    state = algo.init(key)
    out = algo.act(algo.actor(state), obs, algo.carry(batch_size), key)    # out.action [B], out.extras: value
    state, aux = jax.jit(algo.update)(state, rollout, key)                 # rollout: jrl.types.Rollout [T, B]

Layer norm makes this stable (`network.layer_norm`, on in DEFAULT_NETWORK): without it Q-learning may diverge. The
targets are Peng's Q(lambda): lambda-returns whose values are max_a Q, which acting has computed already. The optimizer
is Adam; the paper's RAdam was not better on CartPole. Gradients and statistics are reduced over
`make(..., axis_name="d")`; float hyper-parameters are leaves of Config and can be vmapped.

Where observations have an action mask, max_a is over the allowed actions, and only those are taken. With memory
(`network.core`) minibatches are of sequences, `network.max_seq_len` steps long, which start from the memory that acting
had there.
"""

from dataclasses import replace
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import struct

from jrl import networks, spaces
from jrl.algos import custom_loss, exploration, observer, parameter_noise, parts, sequences
from jrl.algos.custom_loss import Loss
from jrl.algos.exploration import EpsilonGreedy, OverQ
from jrl.bounds import Count, NonNegativeSchedule, Positive, Unit
from jrl.networks import Head, NetworkConfig
from jrl.ops import exploration as ops
from jrl.ops import losses, minibatch, normalize, returns, schedules
from jrl.types import (
    ActOut,
    Algo,
    Array,
    Discrete,
    EnvSpec,
    InputError,
    Key,
    PyTree,
    Rollout,
    UpdateAux,
    hyperparams,
)

DEFAULT_NETWORK = NetworkConfig(hidden=(128, 128), activation="relu", layer_norm=True)


@hyperparams
class Config:
    """Hyper-parameters of PQN; a Schedule is a number or `[[env_steps, value], ...]`."""

    uncorrected: ClassVar[bool] = True  # rollouts count as the policy's own, which with rollout.mode async they are not

    lr: NonNegativeSchedule = 5e-4  # step size
    gamma: Unit = 0.99  # discount per step
    q_lambda: Unit = 0.65  # of the lambda-returns: 0 is one-step Q-learning, 1 the return of the whole rollout
    num_epochs: Count = 2  # passes over each rollout
    num_minibatches: Count = 4  # gradient steps per pass
    loss: Literal["mse", "huber"] = "mse"  # half the squared error, or huber
    normalize_obs: bool = False  # observations to mean 0 and deviation 1 by running statistics
    normalize_reward: bool = False  # divides rewards by the running deviation of the discounted return
    normalize_reward_clip: Positive | None = 10.0  # bound of rewards that were so divided; null: none
    # how actions are chosen while training
    exploration: OverQ = EpsilonGreedy(epsilon=((0, 1.0), (100_000, 0.05)))
    max_grad_norm: Positive | None = 10.0  # clips the global norm of the gradient; null: no clipping
    max_leaf_norm: Positive | None = None  # clips the norm of each parameter array's gradient
    max_grad_value: Positive | None = None  # clips each element of the gradient
    adam_eps: Positive = 1e-8  # added to Adam's denominator

    def validate(self) -> list[str]:
        """What is wrong with the combination of values, each with its mend."""
        return exploration.validate(self.exploration)


@struct.dataclass
class State:
    params: PyTree
    opt_state: PyTree
    obs_stats: PyTree  # normalize.RunningStats, or () without normalize_obs
    return_stats: PyTree  # normalize.RunningStats of the discounted return, or () without normalize_reward
    env_steps: Array  # [] u32, environment steps learned from, over all devices


@struct.dataclass
class NoisyState(State):
    """With exploration by parameter noise."""

    noise: parameter_noise.Noise


@struct.dataclass
class Rows:
    """One row per environment step, as the loss reads it: N rows, or with a core sequences [N, L]."""

    obs: PyTree  # as the network reads it: normalised, and of sequences a Window
    action: Array  # [N] i32
    target: Array  # [N] f32
    weight: Array  # [N] f32, 0 on masked rows, 1 on average


def make(
    cfg: Config,
    spec: EnvSpec,
    network: NetworkConfig = DEFAULT_NETWORK,
    *,
    axis_name: str | None = None,
    loss: Loss | None = None,
) -> Algo:
    """PQN as pure functions.

    Args:
      cfg: hyper-parameters; floats may be traced.
      spec: spaces of the environment; `num_envs` is not read, the rollout's shape counts.
      network: shape of the Q network.
      axis_name: of the mapped axis over devices; None outside of one.
      loss: takes the place of the algorithm's own, of Rows [N], with memory [N, L] (`jrl.algos`); None: none does.
    Returns:
      An on-policy Algo. The `q` of its `outputs` is that of all actions, also of those that a mask does not allow; with
      memory at an episode's start.
    Raises:
      InputError: a space, torso or core that PQN cannot handle, an exploration that needs more than Q values, or
        parameter noise with memory; in `update`, a `network.max_seq_len` that does not divide the rollout.
    """
    if not isinstance(spec.action, Discrete):
        raise InputError(f"pqn needs a Discrete action space, not {spec.action}: {parts.who_can(spec.action)}")
    parameter_noise.refuse_memory(cfg.exploration, network)
    network = parts.initialised(network, DEFAULT_NETWORK)
    watch = observer.make(spec, network, normalize_obs=cfg.normalize_obs, axis_name=axis_name)
    net = networks.build(watch.spec, network, {"q": Head(spec.action.n)})
    q_values = lambda params, obs: net.apply(params, obs, "q")[0]  # [..., A]
    best = lambda q, mask: jnp.max(ops.masked_q(q, mask), -1)
    explorer = exploration.make(cfg.exploration, spec.action, kinds=("q",))
    noise = parameter_noise.make(cfg.exploration, q_values, spec.action, NoisyState, axis_name=axis_name)
    custom_loss.check(loss)
    optimizer = parts.adam(cfg)
    distance = losses.huber if cfg.loss == "huber" else lambda x: 0.5 * jnp.square(x)
    row_bytes = spaces.num_bytes(spec.observation)

    def init(key: Key) -> State:
        params = net.init(key)
        return_stats = normalize.init(()) if cfg.normalize_reward else ()
        steps = jnp.zeros((), jnp.uint32)
        return noise.init(State(params, optimizer.init(params), watch.init(), return_stats, steps), key)

    def actor(state: State) -> parts.Actor:
        return parts.Actor(state.params, state.env_steps, noise.perturbed(state, state.params), state.obs_stats)

    def act(actor: parts.Actor, obs, carry, key: Key, explore: bool = True) -> ActOut:
        memory, own = parts.split_carry(carry)
        obs = watch.see(actor.obs_stats, obs)
        mask = watch.mask(obs)
        (q,), memory = net.step(actor.params, obs, memory, "q")
        extras = {"value": best(q, mask), **watch.record(actor.obs_stats, obs)}
        if explore:
            # values are those of the parameters that learn, whatever acts
            q = q if actor.noisy == () else q_values(actor.noisy, obs)
            action, own = explorer.sample(q, key, actor.env_steps, own, mask)
        else:
            action = ops.masked_argmax(q, mask)
        return ActOut(action, parts.join_carry(memory, own), extras)

    def memories(state: State, obs, rollout: Rollout) -> tuple[PyTree, PyTree]:
        """The memory before each sequence of the rollout and that after it; () without a core."""
        if not network.recurrent:
            return (), ()
        length = sequences.length_of(network, rollout.reward.shape[0])
        unroll = lambda window: ((), net.unroll(state.params, window, "q")[1])
        _, starts, after = sequences.along(unroll, obs, rollout.mask, parts.split_carry(rollout.carry)[0], length)
        return starts, after

    def values(state: State, obs, rollout: Rollout) -> Array:
        """max_a Q(obs_t) [T, B]: Q does not change while a rollout is collected, so that acting has computed it."""

        def anew():
            if not network.recurrent:
                return jax.lax.map(lambda x: best(q_values(state.params, x), watch.mask(x)), obs)
            length, memory = sequences.length_of(network, len(rollout.reward)), parts.split_carry(rollout.carry)[0]

            def unroll(window):
                (q,), after = net.unroll(state.params, window, "q")
                return best(q, watch.mask(window)), after

            return sequences.along(unroll, obs, rollout.mask, memory, length)[0]

        return observer.values_seen(rollout, rollout.extras["value"], anew)

    def rows_of(state: State, rollout: Rollout) -> tuple[Rows, PyTree, PyTree]:
        """Q(lambda) targets and weights: rows [T, B], memory before each sequence, and updated return statistics."""
        return_stats = parts.observe_returns(state.return_stats, rollout, axis_name)
        state = observer.begun(watch, state, rollout)
        obs, last_obs = watch.recall(state.obs_stats, rollout), watch.see(state.obs_stats, rollout.last_obs)
        starts, memory = memories(state, obs, rollout)
        last = best(net.step(state.params, last_obs, memory, "q")[0][0], watch.mask(last_obs))
        target = returns.lambda_returns(
            parts.scaled_reward(cfg, return_stats, rollout.reward),
            rollout.terminated,
            rollout.terminated | rollout.truncated,
            jnp.concatenate([values(state, obs, rollout), last[None]]),
            gamma=cfg.gamma,
            lambda_=cfg.q_lambda,
        )
        action, target = parts.cleared(rollout.mask, (rollout.action, target))
        return Rows(obs, action, target, parts.weights(rollout.mask, axis_name)), starts, return_stats

    def own_loss(params, rows: Rows):
        q = q_values(params, rows.obs)
        # a comparison instead of an index: its gradient is a select, that of an index a scatter
        taken = jax.lax.broadcasted_iota(jnp.int32, q.shape, q.ndim - 1) == rows.action[..., None]
        value = jnp.sum(jnp.where(taken, q, 0.0), -1)
        mean = lambda x: jnp.mean(rows.weight * x)
        error = mean(distance(value - rows.target))
        return error, {"loss/q": error, "value/q": mean(value), "value/target": mean(rows.target)}

    rows_loss = custom_loss.over_rows(loss, own_loss, parts.QNetwork(net.init, q_values))

    def update(state: State, rollout: Rollout, key: Key) -> tuple[State, UpdateAux]:
        steps, num_envs = rollout.reward.shape
        length = sequences.length_of(network, steps)  # with a core the rows are sequences
        num_steps = steps // length
        rows, memory, return_stats = rows_of(state, rollout)
        take = minibatch.row_taker(sequences.cut(rows, memory, length) if network.recurrent else sequences.flat(rows))
        chunk = minibatch.chunk_rows(num_steps * num_envs // cfg.num_minibatches, row_bytes, length=length)
        lr = schedules.value(cfg.lr, state.env_steps)

        def step(carry, index):
            params, opt_state = carry
            gradient, metrics = minibatch.mean_gradient(rows_loss, params, take(index), chunk)
            gradient, metrics = parts.pmean((gradient, metrics), axis_name)
            return parts.descend(optimizer, lr, gradient, opt_state, params), metrics

        def epoch(carry, key):
            index = minibatch.shuffle(key, num_steps, num_envs, cfg.num_minibatches, axis_name=axis_name)
            return jax.lax.scan(step, carry, index)

        start = (state.params, state.opt_state)
        (params, opt_state), metrics = jax.lax.scan(epoch, start, jax.random.split(key, cfg.num_epochs))
        last_obs = watch.see(state.obs_stats, rollout.last_obs)
        state = noise.adapted(state, state.params, last_obs, watch.mask(last_obs))  # of the parameters that acted
        env_steps = parts.count_steps(state.env_steps, rollout.mask, axis_name)
        obs_stats = watch.observe(state.obs_stats, rollout.obs, rollout.mask)
        metrics = jax.tree.map(jnp.mean, metrics) | {"train/lr": lr} | noise.metrics(state)
        state = replace(state, params=params, opt_state=opt_state, env_steps=env_steps)
        state = replace(state, obs_stats=obs_stats, return_stats=return_stats)
        return state, UpdateAux(metrics)

    def looked_at(state: State, obs) -> dict[str, Array]:
        memory = net.carry(spaces.batch_shape(spec.observation, obs)[0])
        return {"q": net.step(state.params, watch.see(state.obs_stats, obs), memory, "q")[0][0]}

    return Algo(
        init=init,
        actor=actor,
        carry=parts.carry_of(net.carry, explorer.carry),
        act=act,
        update=update,
        on_policy=True,
        outputs=looked_at,
        running_return_gamma=cfg.gamma if cfg.normalize_reward else None,
    )


__all__ = ["Config", "NoisyState", "State", "make"]
