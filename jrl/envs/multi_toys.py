"""Small multi-agent tasks: copies of a single-agent task, and games with known best returns."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jrl.envs import classic, pictures
from jrl.envs.jax_env import Definition, index, select
from jrl.envs.multi_agent import MultiDefinition, check_num_agents, join_spaces
from jrl.types import Array, Box, Dict, Discrete, InputError, MultiBinary, PyTree

# ---------------------------------------------------------------- copies of a single-agent task


@struct.dataclass
class _Copies:
    own: PyTree  # state of the tasks, leaves [G, A, ...]
    alive: Array  # [G, A] bool


def copy_task(
    definition: Definition,
    num_agents: int,
    *,
    draw: Callable[[Sequence[Any]], np.ndarray] | None = None,
    fps: float = 10.0,
) -> MultiDefinition:
    """Returns the environment of `num_agents` agents, agent_0, agent_1, ..., each with its own copy of a task.

    An agent whose task ends leaves; the others continue until the last. With one agent it equals the task bit by bit.
    The global state concatenates all observations, if they are Boxes.

    Args:
      definition: definition of a single agent, without a `task` that can be set.
      num_agents: A.
      draw: function from the state of one agent's task to a picture. Pictures are drawn side by side, those of agents
        that have left in pale colours.
      fps: see `MultiDefinition`.
    Raises:
      InputError: a definition with a `task`.
    """
    if definition.task is not None:
        raise InputError(
            "copy_task: expected a definition whose task is None, got one with a task, which agents cannot share"
        )
    count = num_agents
    flat = lambda tree: jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)
    by_agent = lambda tree: jax.tree.map(lambda x: x.reshape(-1, count, *x.shape[1:]), tree)

    def dealt(draws: Array) -> Array:
        """Returns draws [num_draws * A, G] as [num_draws, G * A]."""
        return draws.reshape(definition.num_draws, count, -1).swapaxes(1, 2).reshape(definition.num_draws, -1)

    def reset(draws: Array) -> _Copies:
        return _Copies(by_agent(definition.reset(dealt(draws))), jnp.ones((draws.shape[1], count), bool))

    def step(state: _Copies, actions: PyTree, draws: Array) -> tuple[_Copies, Array, Array]:
        before = flat(state.own)
        after, reward, ended = definition.step(before, flat(actions), dealt(draws))
        own = by_agent(select(state.alive.reshape(-1), after, before))
        ended = ended.reshape(-1, count)
        return _Copies(own, state.alive & ~ended), reward.reshape(-1, count), ended

    def picture(state: _Copies) -> np.ndarray:
        assert draw is not None
        each = [draw(jax.tree.map(lambda x, k=k: x[k], state.own)) for k in range(count)]
        alive = zip(each, np.asarray(state.alive), strict=True)
        return pictures.side_by_side([one if there else pictures.fade(one) for one, there in alive])

    observe = lambda state: by_agent(definition.observe(flat(state.own)))
    box = definition.observation if isinstance(definition.observation, Box) else None
    return MultiDefinition(
        agents=_agent_names("agent", count),
        observation=definition.observation,
        action=definition.action,
        max_episode_steps=definition.max_episode_steps,
        num_draws=definition.num_draws * count,
        reset=reset,
        step=step,
        observe=observe,
        state=None if box is None else join_spaces(box, count),
        view=None if box is None else lambda state: observe(state).reshape(state.alive.shape[0], -1),
        draw=None if draw is None else picture,
        fps=fps,
    )


def _agent_names(name: str, count: int) -> tuple[str, ...]:
    return tuple(f"{name}_{i}" for i in range(count))


def multi_agent_cartpole(num_agents: int = 2) -> MultiDefinition:
    """Returns the definition of MultiAgentCartPole-v1: each agent has its own CartPole-v1 (as RLlib's).

    An agent leaves when its pole falls; the game continues for the others, at most 500 steps. Observation [4], actions
    left and right, +1 per step as in CartPole-v1. With one agent it equals CartPole-v1 bit by bit.

    Raises:
      InputError: `num_agents` below 1.
    """
    count = check_num_agents(num_agents, "MultiAgentCartPole-v1", 1)
    return copy_task(classic.cartpole(), count, draw=pictures.cartpole, fps=50.0)


def multi_agent_pendulum(num_agents: int = 2) -> MultiDefinition:
    """Returns the definition of MultiAgentPendulum-v1: each agent has its own Pendulum-v1, for 200 steps (as RLlib's).

    Observation [3], torque [1] and reward as in Pendulum-v1.

    Raises:
      InputError: `num_agents` below 1.
    """
    count = check_num_agents(num_agents, "MultiAgentPendulum-v1", 1)
    return copy_task(classic.pendulum(), count, draw=pictures.pendulum, fps=20.0)


# ---------------------------------------------------------------- games


def two_step_game() -> MultiDefinition:
    """Returns the definition of TwoStepGame-v0: two agents, two actions, two steps (QMIX, arXiv:1803.11485).

    In the first step, agent_0's action leads to state 2A (action 0) or 2B (1), without reward. The second step ends the
    game. In 2A it pays the team 7 for any actions; in 2B it pays [[0, 1], [1, 8]] by the actions of agent_0 and
    agent_1. Each agent gets half, so that returns, summed over agents, are the team's. Agents with additive values
    (VDN) earn 7; the best is 8. Section 5.2 of the paper has both.

    Observation and global state [3] f32, one-hot: the first state, 2A, 2B.
    """
    payoff = np.array([[[7.0, 7.0], [7.0, 7.0]], [[0.0, 1.0], [1.0, 8.0]]], np.float32)

    def step(state, actions, draws):
        first = state == 0
        paid = jnp.asarray(payoff)[jnp.maximum(state - 1, 0), actions[:, 0], actions[:, 1]]
        share = jnp.where(first, 0.0, paid / 2)
        state = jnp.where(first, 1 + actions[:, 0], state)
        both = lambda x: jnp.stack([x, x], -1)
        return state, both(share), both(~first)

    one_hot = lambda state: jax.nn.one_hot(state, 3)
    space = Box((3,), "float32", 0.0, 1.0)
    return MultiDefinition(
        agents=_agent_names("agent", 2),
        observation=space,
        action=Discrete(2),
        max_episode_steps=2,
        num_draws=1,
        reset=lambda draws: jnp.zeros(draws.shape[1], jnp.int32),
        step=step,
        observe=lambda state: jnp.repeat(one_hot(state)[:, None], 2, axis=1),
        state=space,
        view=one_hot,
    )


@struct.dataclass
class _Moves:
    last: Array  # [G, 2] i32, last move of both players; 3: none yet
    count: Array  # [G] i32
    habit: Array  # [G] i32, move that the heuristic opponent always plays; 3: it beats the learned agent's last move


def rock_paper_scissors(moves: int = 15, opponent: str = "learn") -> MultiDefinition:
    """Returns the definition of RockPaperScissors-v0, `moves` moves per game.

    +1 for the winning move, -1 for the losing, 0 for a draw. Actions: rock 0, paper 1, scissors 2; each beats the
    previous one. Observation Discrete(4): the opponent's last move, 3 before the first. Two agents, player_0 and
    player_1; the best average return is 0.

    With `opponent: heuristic` there is one agent, `learned`. Its opponent is drawn for each game (as in RLlib's
    example, whose stop criterion is a return of 6). With probability 1/2 it plays one random move all the time.
    Otherwise it beats the learned agent's last move, after a random first move. The best average return is 14: the
    first move is a guess, and an agent that remembers its own last move knows all others of the second kind.

    Raises:
      InputError: fewer than one move, or an unknown opponent.
    """
    if isinstance(moves, bool) or not isinstance(moves, int) or moves < 1:
        raise InputError(f"env.options.moves: RockPaperScissors-v0: expected an integer >= 1, got {moves!r}: use 15")
    if opponent not in ("learn", "heuristic"):
        raise InputError(
            f"env.options.opponent: RockPaperScissors-v0: expected learn or heuristic, got {opponent!r}: use learn"
        )
    learns = opponent == "learn"
    count = 2 if learns else 1
    none = 3

    def reset(draws: Array) -> _Moves:
        num_envs = draws.shape[1]
        habit = jnp.where(draws[0] < 0.5, index(draws[1], 3), none)
        return _Moves(jnp.full((num_envs, 2), none, jnp.int32), jnp.zeros(num_envs, jnp.int32), habit)

    def played(state: _Moves, draws: Array) -> Array:
        """Returns the heuristic opponent's move [G] i32."""
        seen = state.last[:, 0]
        beats = jnp.where(seen == none, index(draws[0], 3), (seen + 1) % 3)
        return jnp.where(state.habit == none, beats, state.habit)

    def step(state: _Moves, actions: Array, draws: Array) -> tuple[_Moves, Array, Array]:
        last = actions if learns else jnp.stack([actions[:, 0], played(state, draws)], -1)
        won = jnp.asarray([0.0, 1.0, -1.0])[(last[:, 0] - last[:, 1]) % 3]
        state = _Moves(last, state.count + 1, state.habit)
        over = jnp.repeat((state.count >= moves)[:, None], count, axis=1)
        return state, jnp.stack([won, -won], -1)[:, :count], over

    return MultiDefinition(
        agents=_agent_names("player", 2) if learns else ("learned",),
        observation=Discrete(4),
        action=Discrete(3),
        max_episode_steps=moves,
        num_draws=2,
        reset=reset,
        step=step,
        observe=lambda state: state.last[:, ::-1][:, :count],
    )


@struct.dataclass
class _Prison:
    room: Array  # [G] i32, agent in the room
    light: Array  # [G] bool
    been: Array  # [G, A] bool, agents that have been in the room, including the present one
    day: Array  # [G] i32, number of past days


def switch_riddle(num_agents: int = 3) -> MultiDefinition:
    """Returns the definition of SwitchRiddle-v0: prisoners who communicate by one light (arXiv:1605.06676).

    On each of 4 n - 6 days, one of n prisoners, drawn at random, is in the room. Actions there: none 0, tell 1 (that
    all have been in the room), switch the light 2. Telling ends the game, +1 for the team if right and -1 if not; the
    last day ends it with 0. Each agent gets 1/n, so that the sum over agents is the team's. The other prisoners wait:
    their mask allows only action 0, and their actions are ignored.

    Observation: obs [2] f32, whether the agent is in the room, and whether it sees the light on; action_mask. Global
    state [2 n + 2] f32: the light, the share of past days, the agent in the room, the agents that have been there. With
    3 prisoners, full knowledge earns 20/27, and so do agents that know the day and whether they have been there.
    Without memory and with one policy for all, the best is 0.

    Raises:
      InputError: fewer than three agents.
    """
    n = check_num_agents(num_agents, "SwitchRiddle-v0", 3)
    days, tell, switch = 4 * n - 6, 1, 2

    def entered(room: Array) -> Array:
        return room[:, None] == jnp.arange(n)[None]

    def reset(draws: Array) -> _Prison:
        room = index(draws[0], n)
        return _Prison(room, jnp.zeros(room.shape, bool), entered(room), jnp.zeros_like(room))

    def step(state: _Prison, actions: Array, draws: Array) -> tuple[_Prison, Array, Array]:
        action = jnp.take_along_axis(actions, state.room[:, None], axis=1)[:, 0]
        told = action == tell
        share = jnp.where(told, jnp.where(state.been.all(-1), 1.0, -1.0), 0.0) / n
        day, room = state.day + 1, index(draws[0], n)
        over = told | (day >= days)
        state = _Prison(room, state.light ^ (action == switch), state.been | entered(room), day)
        to_all = lambda x: jnp.repeat(x[:, None], n, axis=1)
        return state, to_all(share), to_all(over)

    def observe(state: _Prison) -> PyTree:
        inside = entered(state.room)
        allowed = jnp.stack([jnp.ones_like(inside), inside, inside], -1)
        obs = jnp.stack([inside, inside & state.light[:, None]], -1)
        return {"action_mask": allowed.astype(jnp.int8), "obs": obs.astype(jnp.float32)}

    def view(state: _Prison) -> Array:
        parts = [state.light[:, None], (state.day / days)[:, None], entered(state.room), state.been]
        return jnp.concatenate([part.astype(jnp.float32) for part in parts], -1)

    return MultiDefinition(
        agents=_agent_names("agent", n),
        observation=Dict((("action_mask", MultiBinary((3,))), ("obs", Box((2,), "float32", 0.0, 1.0)))),
        action=Discrete(3),
        max_episode_steps=days,
        num_draws=1,
        reset=reset,
        step=step,
        observe=observe,
        state=Box((2 * n + 2,), "float32", 0.0, 1.0),
        view=view,
    )
