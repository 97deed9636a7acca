"""The view of all that `multi_agent.state` adds to observations of JaxMARL's environments, of one like them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.envs import jaxmarl_env
from jrl.errors import InputError
from jrl.types import Box, Dict, Discrete

GAMES, LIMIT = 3, 2
NAMES = tuple(f"agent_{i}" for i in range(11))  # agent_10 sorts before agent_2


class Joined:
    """A clock, which agent i sees i + 1 times as large; the last sees it twice."""

    agents = NAMES
    max_steps = LIMIT

    def observation_space(self, agent):
        return Box((1 + (agent == NAMES[-1]),))

    def action_space(self, agent):
        return Discrete(2)

    def get_avail_actions(self, state):
        return {agent: jnp.array([True, i % 2 == 0]) for i, agent in enumerate(NAMES)}

    def get_obs(self, state):
        return {agent: (i + 1) * jnp.full(self.observation_space(agent).shape, state) for i, agent in enumerate(NAMES)}

    def reset(self, key):
        start = jax.random.uniform(key)
        return self.get_obs(start), start

    def step_env(self, key, state, actions):
        state = state + 1
        none = dict.fromkeys(NAMES, jnp.zeros(()))
        return self.get_obs(state), state, none, {**none, "__all__": jnp.zeros((), bool)}, {}


class ByMethod(Joined):
    def get_world_state(self, state):
        return jnp.stack([jnp.stack([state, -state]), jnp.stack([10 * state, state])])


class AmongObservations(ByMethod):  # as SMAX's, which have both
    def get_obs(self, state):
        return {**super().get_obs(state), "world_state": jnp.stack([state.astype(jnp.int32), jnp.int32(7)])}


EXPECTED = {
    Joined: lambda clock: np.concatenate([np.repeat(i + 1, 1 + (i == 10)) * clock for i in range(11)]),
    ByMethod: lambda clock: np.array([clock, -clock, 10 * clock, clock]),
    AmongObservations: lambda clock: np.array([int(clock), 7]),
}


def made(cls, **settings):
    return jaxmarl_env.make(cls(), GAMES, None, lambda space: space, **settings)


@pytest.mark.parametrize(
    "cls",
    [ByMethod, pytest.param(Joined, marks=pytest.mark.slow), pytest.param(AmongObservations, marks=pytest.mark.slow)],
)
def test_all_agents_see_what_the_environment_says_or_all_of_them_observe(cls):
    plain, env = made(cls), made(cls, state=True)
    size = EXPECTED[cls](np.float32(0)).size
    for without, part in zip(plain.spec.observation.items, env.spec.observation.items, strict=True):
        assert part == Dict((*without.items, ("state", Box((size,)))))
    (own, a), (state, b) = (jax.jit(one.reset)(jax.random.key(0)) for one in (plain, env))
    action = tuple(np.zeros(GAMES * len(kind), np.int32) for kind in env.spec.kinds)
    steps = jax.jit(plain.step), jax.jit(env.step)
    for t in range(2 * LIMIT + 1):  # over the end of a game, and into the next
        clocks = np.asarray(a[0]["obs"]).reshape(GAMES, -1)[:, 0]  # agent_0 sees the clock
        for without, part, kind in zip(a, b, env.spec.kinds, strict=True):
            view = np.asarray(part["state"]).reshape(GAMES, len(kind), size)
            assert view.dtype == np.float32
            expected = np.stack([EXPECTED[cls](clock) for clock in clocks])
            np.testing.assert_allclose(view, np.repeat(expected[:, None], len(kind), 1), rtol=1e-6)
            jax.tree.map(np.testing.assert_array_equal, without, {k: x for k, x in part.items() if k != "state"})
        (own, one), (state, other) = (
            step(inner, action, jax.random.key(t + 1)) for step, inner in zip(steps, (own, state), strict=True)
        )
        a, b = one.obs, other.obs


def test_an_observation_with_a_state_of_its_own_is_refused():
    class Named(Joined):
        def observation_space(self, agent):
            return Dict((("state", Box((1,))),))

        def get_obs(self, state):
            return {agent: {"state": jnp.full(1, state)} for agent in NAMES}

    with pytest.raises(InputError, match=r"multi_agent.state: .*an item state already"):
        made(Named, state=True)
