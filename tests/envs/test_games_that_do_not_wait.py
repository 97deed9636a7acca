"""Games that do not wait for each other: each has the very rows that it has where all wait."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl import spaces
from jrl.envs import agent_options, team
from jrl.envs.context import OnFailure
from jrl.envs.history import add_history
from jrl.envs.make import make
from jrl.envs.transform import transformed
from jrl.rollout.collect import HostCollector
from jrl.rollout.collect_async import AsyncCollector
from jrl.types import ActOut, Box

GAMES, T, ROLLOUTS, INITIAL = 4, 6, 7, 0.5
# environment -> (options, how many games answer at once, with how many under way one is waited for, views)
CASES = {
    "a pool of Walkers": ({"ends": [3, 9, 5], "born": 2, "truncates": ["w_0"]}, 2, 2, ("history", "ids")),
    "Unequal": ({"ends": [3, 9, 5]}, 3, 3, ("history", "ids")),
    "PatientTurns": ({}, 3, 2, ("function", "numbers")),
    "a team of Walkers": ({"ends": [3, 9, 5]}, 3, 2, ("team",)),
    "two teams": ({"ends": [3, 9, 5], "born": 2}, 2, 1, ("groups", "ids")),
    "all have places: Unequal": ({"ends": [3, 9, 5]}, GAMES, 1, ("ids",)),
}
ACTOR = {"w": jnp.float32(0.3), "place": jnp.float32(0.2)}


def only_time(obs):
    """What all see: the sum of what each does, and their masks."""
    total = sum(jax.tree.leaves(jax.tree.map(lambda x: x.astype(jnp.float32).sum(), obs)))
    return {agent: {**one, "obs": one["obs"] + total} for agent, one in obs.items()}


VIEWS = {
    "history": partial(add_history, prev_action=True, prev_reward=True),
    "ids": agent_options.add_agent_ids,
    "function": partial(agent_options.apply_observation_fn, path=f"{__name__}:only_time"),
    "numbers": agent_options.add_game_numbers,
    "team": team.join_all_agents,
    "groups": partial(team.join_groups, groups={"first": ["w_0", "w_2"]}),
}


def policy(spec):
    """A deterministic policy whose memory decides: a wrong one changes the actions."""

    def act(actor, obs, memory, key, explore=True):
        own = spaces.split_by_kind(spec.kinds, memory["m"])
        order = jnp.argsort(jnp.concatenate(spaces.split_by_kind(spec.kinds, jnp.arange(len(memory["m"])))))
        seen = obs if spec.kinds else (obs,)
        after, actions = [], []
        for one, before, mine in zip(spaces.by_kind(spec), own, seen, strict=True):
            flat = [x.reshape(len(before), -1).astype(jnp.float32).mean(-1) for x in jax.tree.leaves(mine)]
            now = 0.6 * before + actor["w"] * sum(flat) + actor["place"] * jnp.arange(len(before))
            after.append(now)
            actions.append(chosen(one.action, now, mask_of(mine)))
        memory = {"m": jnp.concatenate(after)[order]}
        return ActOut(tuple(actions) if spec.kinds else actions[0], memory, {"m": memory["m"]})

    return act


def mask_of(obs):
    obs = obs.get("obs", obs) if isinstance(obs, dict) and "game" in obs else obs
    return obs.get("action_mask") if isinstance(obs, dict) else None


def chosen(space, now, mask):
    if isinstance(space, Box):
        return jnp.broadcast_to(jnp.sin(now[:, None]), (len(now), *space.shape))  # of one axis
    sizes = getattr(space, "nvec", None) or (space.n,)
    each = []
    for i, n in enumerate(sizes):
        score = jnp.sin((i + 3.0) * now[:, None] * jnp.arange(1, n + 1)[None])
        own = None if mask is None else mask[:, sum(sizes[:i]) : sum(sizes[: i + 1])]
        each.append((score if own is None else jnp.where(own != 0, score, -2.0)).argmax(-1).astype(jnp.int32))
    return jnp.stack(each, -1) if hasattr(space, "nvec") else each[0]


class Scattered:
    """Games of one environment each, which answer in random order; a `jrl.types.AsyncEnv`."""

    def __init__(self, games, batch_size, least, seed):
        self._games, self.batch_size, self.least = games, batch_size, least
        one = games[0].spec
        self.spec = one._replace(num_envs=one.num_envs * len(games))
        self._draws, self._ready = np.random.default_rng(seed), {}

    def reset(self):
        for i, game in enumerate(self._games):
            game.reset()
            self._ready[i] = game._result(None, np.zeros(1, bool))

    def send(self, action, env_id):
        split = lambda x: x.reshape(len(env_id), -1, *x.shape[1:])
        for row, i in enumerate(env_id.tolist()):
            assert i not in self._ready
            self._ready[i] = self._games[i].step(jax.tree.map(lambda x, row=row: split(x)[row], action))

    def recv(self):
        assert len(self._ready) >= self.least
        size = min(self._draws.integers(1, self.batch_size + 1), len(self._ready)) if self.least == 1 else self.least
        order = [i for i in sorted(self._ready) if i != 2 or self._draws.random() < 0.2] or [*self._ready]
        ids = self._draws.permutation(order)[:size].astype(np.int32)
        results = [self._ready.pop(int(i)) for i in ids]
        return ids, jax.tree.map(lambda *x: np.concatenate(x), *results)

    def close(self):
        pass


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case == "Unequal" else [pytest.mark.slow]) for case in CASES]
)
def test_rows_of_each_game_are_those_that_it_has_where_all_wait(case):
    options, batch_size, least, shown = CASES[case]
    name = f"agent_envs:{case.split()[-1] if 'team' not in case else 'Walkers'}"
    through = lambda env: env if not shown else through_all(env, shown)
    how = {"backend": "gymnasium", "options": options, "normalize_actions": False, "clip_actions": False}
    waiting = through(make(name, num_envs=GAMES, **how))
    each = [make(name, num_envs=1, seed=i, **how) for i in range(GAMES)]
    env = through(Scattered(each, batch_size, least, seed=3))
    spec = env.spec
    assert spec == waiting.spec
    act, carry = policy(spec), lambda n: {"m": jnp.full(n, INITIAL)}
    # policies may go by where a game stands if there is room for all
    actor, key = {**ACTOR, "place": jnp.float32(0.2 if batch_size == GAMES else 0.0)}, jax.random.key(0)
    found = AsyncCollector(env, act, length=T, carry=carry)
    want = HostCollector(waiting, act, length=T, carry=carry)
    right = joined([want.next(actor, key)[0] for _ in range(ROLLOUTS)], spec)
    rollouts = [jax.device_get(found.next(actor, key)[0]) for _ in range(ROLLOUTS)]
    counts = np.stack([rollout.count.reshape(GAMES, -1) for rollout in rollouts])
    assert (counts == counts[..., :1]).all() and (least == 1) == (counts == T).all()
    assert ((counts[..., 0].sum(0) > 2 * T).sum() >= GAMES - 1) and (counts.sum(0) > 3).all()
    rows = joined(rollouts, spec)
    for g in range(GAMES):
        mine, own, n = rows[g], right[g], counts[:, g, 0].sum()
        kept = np.concatenate([np.arange(T) < count for count in counts[:, g, 0]])
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[kept], y[:n]), mine, own)  # noqa: B023 - at once


def through_all(env, shown):
    for name in shown:
        env = transformed(env, VIEWS[name])
    return env


def joined(rollouts, spec):
    """For each game its rows of all rollouts, one after the other: obs, action, reward, ends, mask, memory, over."""
    games = []
    for g in range(GAMES):
        cut = lambda x, g=g: np.asarray(x).reshape(len(x), GAMES, -1, *x.shape[2:])[:, g]
        parts = [(r.obs, r.action, r.reward, r.terminated, r.mask, r.extras) for r in rollouts]
        parts = [(*one, r.over) if spec.agents else one for one, r in zip(parts, rollouts, strict=True)]
        games.append(jax.tree.map(lambda *x, cut=cut: np.concatenate([cut(y) for y in x]), *parts))
    return games


# ---------------------------------------------------------------- in worker processes


READY = {"remote_worker_envs": True, "batch_wait_ms": 0.0, "num_envs": 3}


@pytest.mark.slow
def test_games_in_processes_that_do_not_wait_have_the_same_rows():
    how = {"options": {"ends": [3, 9, 5], "born": 2}}
    env, waiting = make("agent_envs:Walkers", **how, **READY), make("agent_envs:Walkers", num_envs=3, **how)
    act, carry = policy(env.spec), lambda n: {"m": jnp.full(n, INITIAL)}
    actor, key = ACTOR, jax.random.key(0)
    of = lambda kind, env: kind(env, act, length=20, carry=carry, record_infos=True)
    found, want = of(AsyncCollector, env), of(HostCollector, waiting)
    try:
        for _ in range(2):
            mine, own = found.next(actor, key)[0], want.next(actor, key)[0]
            assert (mine.count == 20).all()
            jax.tree.map(np.testing.assert_array_equal, mine.replace(count=None), own)
            assert found.infos == want.infos
        assert found.reset_infos == want.reset_infos
        found.foreach_env(lambda game: game.t)
        with pytest.raises(ValueError, match="send each idle one an action"):
            env.send(np.zeros(6, np.int32), np.array([1, 1], np.int32))
        with pytest.raises(ValueError, match="action"):
            env.send(np.zeros(2, np.int32), np.array([1], np.int32))  # two actions of three agents
    finally:
        env.close()


def test_a_game_that_breaks_is_made_anew_while_the_others_go_on():
    env = make("agent_envs:Breaks", on_failure=OnFailure(restart=True), **READY)
    act, carry = policy(env.spec), lambda n: {"m": jnp.full(n, INITIAL)}
    collector = AsyncCollector(env, act, length=8, carry=carry)
    try:
        rollout, _ = collector.next(ACTOR, jax.random.key(0))
    finally:
        collector.close()
    # each process has a first game of its own, which breaks at its third step, when w_0 has ended
    assert collector.metrics["env/failures"] == 3 and env.num_restarts == 3
    assert not rollout.mask[2].any() and rollout.mask[3:6].any(-1).all()
    np.testing.assert_array_equal(rollout.truncated[1].reshape(3, 3), [[False, True, True]] * 3)
    assert rollout.over.shape == (8, 3)
