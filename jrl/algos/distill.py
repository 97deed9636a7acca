"""Teacher-student distillation by DAgger (arXiv:1011.0686): a teacher labels the states that the student visits.

    teacher = distill.Teacher(other_algo, other_algo.actor(trained_state), spec)
    algo = distill.make(distill.Config(), spec, teacher=teacher)
    out = algo.act(algo.actor(state), obs, algo.carry(batch_size), key)    # out.extras["teacher"]: distribution [B]
    state, aux = jax.jit(algo.update)(state, rollout, key)                  # rollout: jrl.types.Rollout [T, B]

The teacher is a trained policy of any algorithm, with memory or without. Its distribution is that of its actions in
training, with exploration: `Algo.choice`. It reads the whole observation. The student does not read the items
`network.value_inputs`, such as the masses of a simulation. The loss is the KL from the teacher to the student, or the
squared error between their modes, the mean over rows. Recurrent students learn from sequences, as in PPO.

Acting records the labels, so the teacher's own memory follows the episode, and `update` does not need the teacher. The
teacher's weights are constants of the program that acts, and not part of a State or checkpoint.

The network has the parameter names of PPO's policy, so that a PPO run can start from a student. Gradients are averaged
over `make(..., axis_name="d")`; float hyper-parameters are leaves of Config.
"""

import functools
from dataclasses import replace
from typing import Any, ClassVar, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from flax import struct

from jrl import distributions, spaces
from jrl.algos import agent as agents
from jrl.algos import bc, custom_loss, parts, sequences
from jrl.algos.agent import ActorState, Agent, Common, MakeOptions, Records, State
from jrl.algos.exploration import OverDistributions, Stochastic
from jrl.errors import InputError
from jrl.fields.bounds import Count, Name, NonNegativeSchedule, UnitSchedule
from jrl.networks import NetworkConfig
from jrl.ops import schedules
from jrl.types import (
    TEACHER,
    ActOut,
    Algo,
    Array,
    EnvSpec,
    Key,
    Metrics,
    PyTree,
    Rollout,
    UpdateAux,
    hyperparams,
)

# `loss: mse` does not train the deviation: a deviation of 1 would hide the mean action
DEFAULT_NETWORK = NetworkConfig(log_std_init=-2.0)


@hyperparams
class Config(Common):
    """Hyper-parameters of distillation; a Schedule is a number or `[[env_steps, value], ...]`."""

    has_teacher: ClassVar[bool] = True

    lr: NonNegativeSchedule = 1e-3
    # run directory or checkpoint of a policy with the same observations and actions; its best or latest checkpoint
    teacher: Name | None = None
    # kl: from the teacher's distribution to the student's; mse: squared error of the mode, for Box actions, which does
    # not train the deviation
    loss: Literal["kl", "mse"] = "kl"
    # probability of the student's action in each step; else the teacher's mode (1 - DAgger's beta)
    student_acts: UnitSchedule = 1.0
    num_epochs: Count = 4  # passes over a rollout in an update
    num_minibatches: Count = 4  # gradient steps per pass
    microbatch_size: Count | None = None  # rows whose gradient is computed at once; null: chosen for the device
    exploration: OverDistributions = Stochastic()


class Teacher(NamedTuple):
    """A trained policy."""

    algo: Algo
    actor: PyTree  # weights, for `algo.act`
    spec: EnvSpec  # spaces in which it was trained


@struct.dataclass
class Carry:
    """Recurrent states of acting, [B, ...] each."""

    student: PyTree
    teacher: PyTree


@struct.dataclass
class Rows:
    """Rows of the loss: [T, B, *] or [N, *]; with a core sequences [N, L, *]."""

    obs: PyTree  # normalised observations; a Window for sequences
    target: Any  # the teacher's distribution
    weight: Array  # f32, 0 on masked rows, 1 on average


# ---------------------------------------------------------------- acting


def actor(cfg: Config, agent: Agent, state: State) -> ActorState:
    """Returns the parts of a State that acting needs; `student_acts` reads the steps."""
    return replace(agents.actor(cfg, agent, state), env_steps=state.env_steps)


def with_teacher(cfg: Config, student: Algo, teacher: Teacher) -> Algo:
    """Returns the student's Algo, whose `act` records the teacher's distribution and sometimes takes its mode."""

    def carry(batch_size: int, first: Any = 0, total: int | None = None) -> Carry:
        return Carry(student.carry(batch_size, first, total), teacher.algo.carry(batch_size))

    def act(actor: ActorState, obs: PyTree, carry: Carry, key: Key, explore: bool = True) -> ActOut:
        out = student.act(actor, obs, carry.student, key, explore)
        label, memory = _label(teacher, obs, carry.teacher)
        batch = spaces.batch_shape(teacher.spec.action, out.action)
        share = schedules.value(cfg.student_acts, actor.env_steps)
        is_student = jax.random.bernoulli(jax.random.fold_in(key, 1), share, batch)
        pick = lambda mine, its: jnp.where(jnp.expand_dims(is_student, tuple(range(1, mine.ndim))), mine, its)
        action = jax.tree.map(pick, out.action, label.mode())
        return ActOut(action, Carry(out.carry, memory), {**out.extras, TEACHER: distributions.batched(label)})

    return student._replace(carry=carry, act=act, choice=None)


def _label(teacher: Teacher, obs: PyTree, memory: PyTree) -> tuple[Any, PyTree]:
    assert teacher.algo.choice is not None  # `check_teacher`
    return teacher.algo.choice(teacher.actor, obs, memory, True)


def check_teacher(cfg: Config, spec: EnvSpec, teacher: Teacher) -> None:
    """Raises InputError if the teacher has other spaces, or no distribution that the loss can use."""
    for name in ("observation", "action"):
        wanted, found = getattr(spec, name), getattr(teacher.spec, name)
        if not spaces.are_compatible(wanted, found):
            raise InputError(
                f"algo.teacher: expected a policy with the run's {name} space, {wanted}, got {found}: train it "
                "in this environment, with the same options of env, network.use_prev_action and use_prev_reward"
            )
    fix = "use a teacher of ppo, sac, dqn, or td3 with exploration gaussian"
    if teacher.algo.choice is None:
        raise InputError(f"algo.teacher: expected a policy with action probabilities, got one without: {fix}")
    obs = spaces.elements(spec.observation, 1)
    try:
        label = jax.eval_shape(lambda obs: _label(teacher, obs, teacher.algo.carry(1))[0], obs)
    except InputError as e:
        raise InputError(f"algo.teacher: {e}: {fix}") from e
    if cfg.loss == "kl" and isinstance(label, distributions.TanhGaussian):
        raise InputError(
            "algo.loss kl: expected a teacher with the student's kind of distribution, got a squashed Gaussian, as of "
            "sac: use algo.loss=mse"
        )


# ---------------------------------------------------------------- learning


def targets(agent: Agent, state: State, rollout: Rollout) -> tuple[Rows, PyTree]:
    """Returns Rows [T, B] and the student's recurrent state before each sequence; () without a core."""
    obs = agent.observer.recall(state.obs_stats, rollout)
    label = parts.zero_masked(rollout.mask, rollout.extras[TEACHER])
    rows = Rows(obs, label, parts.weights(rollout.mask, agent.axis_name))
    if not agent.network.recurrent:
        return rows, ()
    _, memory, _ = sequences.along(
        lambda window: agent.net.unroll(state.params, window),
        obs,
        rollout.mask,
        agents.split_carry(rollout.carry.student)[0],
        sequences.length_of(agent.network, rollout.reward.shape[0]),
    )
    return rows, memory


def loss(cfg: Config, agent: Agent, params: PyTree, rows: Rows) -> tuple[Array, Metrics]:
    """Returns KL(teacher, student), or |mode(student) - mode(teacher)|^2 in the mean over its elements.

    The mean over Rows [N].
    """
    dist = agent.net.apply(params, rows.obs)
    mean = lambda x: jnp.mean(rows.weight * x)
    metrics = bc.agreement(agent.spec.action, dist, rows.target.mode(), rows.weight)
    error = metrics["policy/mse"] if cfg.loss == "mse" else mean(rows.target.kl(dist))
    return error, {"loss/policy": error, "policy/entropy": mean(dist.entropy()), **metrics}


def update(cfg: Config, agent: Agent, state: State, rollout: Rollout, key: Key) -> tuple[State, UpdateAux]:
    """Makes the epochs of minibatches on a rollout [T, B] with the teacher's labels."""
    if TEACHER not in rollout.extras:
        raise InputError("algo.teacher: expected a teacher to learn from, got none: give make the argument teacher")
    state = agents.with_return_stats(agent, state, rollout)
    rows, memory = targets(agent, agents.with_first_stats(agent, state, rollout), rollout)
    grid = agents.grid(agent, *rows.weight.shape)  # with a core the steps are sequences
    length = rows.weight.size // (grid[0] * grid[1])
    chunk = agents.chunk(cfg, agent, grid[0] * grid[1] // cfg.num_minibatches, length=length)
    take = agents.taker(agents.cut(agent, rows, memory))
    rows_loss = custom_loss.over_rows(agent.loss, functools.partial(loss, cfg, agent), agent.net)
    lr = schedules.value(cfg.lr, state.env_steps)

    def step(carry, batch: Rows):
        params, opt_state = carry
        gradient, metrics = agents.mean_gradient(agent, rows_loss, params, batch, chunk)
        return agents.descend(cfg, agent, lr, gradient, opt_state, params), metrics

    (params, opt_state), metrics = agents.epochs(cfg, agent, step, (state.params, state.opt_state), take, grid, key)
    state = replace(state, params=params, opt_state=opt_state, updates=state.updates + 1)
    metrics = jax.tree.map(jnp.mean, metrics) | {"train/lr": lr}
    return agents.observed(agent, state, rollout), UpdateAux(metrics)


def make(
    cfg: Config,
    spec: EnvSpec,
    network: NetworkConfig = DEFAULT_NETWORK,
    *,
    teacher: Teacher | None = None,
    **options: Unpack[MakeOptions],
) -> Algo:
    """Makes distillation, an on-policy Algo. A user's loss gets Rows [N]. Other arguments and errors: see `jrl.algos`.

    Args:
      teacher: trained policy; None: the Algo acts and cannot learn, as of a student's checkpoint.
    Raises:
      InputError: `loss: mse` with actions that are not Boxes, or a teacher that does not fit; see also `jrl.algos`.
    """
    bc.check_loss(cfg.loss, spec)
    records = Records(seen=True)
    agent = agents.make(cfg, spec, network, bc.policy_network, kind="distribution", records=records, **options)
    student = agents.algo(
        cfg, agent, init=bc.init, policy=bc.policy, update=update, outputs=bc.outputs, memory=agent.net.carry
    )._replace(actor=functools.partial(actor, cfg, agent))
    if teacher is None:
        return student
    check_teacher(cfg, spec, teacher)
    return with_teacher(cfg, student, teacher)
