"""`multi_agent.replay_mode: lockstep`: what all policies draw from their replays is of the same games and times."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_several_agents import GAMES, REPLAY, STEPS, made

from jrl import agents, config
from jrl.api import DQNConfig
from jrl.config import multi_agent
from jrl.errors import InputError
from jrl.learn import learner, parallel
from jrl.migrate import migrate
from jrl.rollout import unroll
from jrl.run import build, build_learner
from jrl.run.plan import Plan
from jrl.types import Box, Discrete, EnvSpec, SequenceBatch, UpdateAux

DRAWN = {"replay": {"batch_size": 64, "learning_starts": 32, "updates_per_step": 1 / (GAMES * STEPS), "burn_in": 2}}
LOCKSTEP = {"replay_mode": "lockstep"}
NAMES = ("agent_0", "agent_1", "agent_2", "agent_3")
OWN = {  # the first two are stacked, the others are two groups more
    "agent_0": {},
    "agent_1": {"algo": {"lr": 1e-2}},
    "agent_2": {"network": {"hidden": [4]}},
    "agent_3": {"algo": {"name": "sac"}, **DRAWN},
}
SPEC = EnvSpec(Box((3,), "float32"), Discrete(2), num_envs=GAMES * len(NAMES), agents=NAMES)


def of(policies=OWN, mode="lockstep", **more):
    section = {"policies": policies, "replay_mode": mode, "mapping": "by_agent"}
    cfg = made(algo={"name": "dqn"}, multi_agent=section, **{**DRAWN, **more})
    return multi_agent.with_agents(cfg, NAMES)


def reward_of(game, time, agent):
    return 1000.0 * game + 10.0 * time + agent


def record(like, start, mask, contiguous):
    """A rollout whose observations say which row they are, [game, time, agent], as do its rewards."""
    time = np.arange(start, start + STEPS + 1)[:, None]
    game, agent = np.repeat(np.arange(GAMES), len(NAMES)), np.tile(np.arange(len(NAMES)), GAMES)
    obs = np.stack(np.broadcast_arrays(game, time, agent), -1).astype(np.float32)
    reward = reward_of(game, time[:-1], agent).astype(np.float32)
    rows = {"obs": obs[:-1], "last_obs": obs[-1], "reward": reward, "mask": mask}
    return dataclasses.replace(like, **rows, contiguous=np.full(like.contiguous.shape, contiguous))


def drawn(cfg, key, masks):
    """policy -> what it drew in each of three updates: obs, reward, weight."""

    def seen(batch):
        obs = batch.window.obs[:, 2:-1] if isinstance(batch, SequenceBatch) else batch.obs
        return batch, {"drawn": jnp.concatenate([obs, jnp.stack([batch.reward, batch.weight], -1)], -1)}

    def make(cfg, spec):
        algo = build.algorithm(cfg, spec, axis_name=parallel.AXIS)
        # what is drawn does not depend on what is learned of it, which would be most of the program
        algo = algo._replace(update=lambda state, batch, key: (state, UpdateAux({})))
        return learner.transform_batches(algo, [seen])

    algo, policies = build.algorithm(cfg, SPEC), agents.make(cfg, SPEC)
    groups = policies.bind(make)
    learn, _ = build_learner.of_policies(Plan(cfg, SPEC), groups)
    assert [group.label for group in groups] == ["agent_0+1", "agent_2", "agent_3"]
    like = unroll.rollout_like(SPEC, algo, length=STEPS, num_envs=SPEC.num_envs)
    like = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)

    one_device = lambda fn: jax.jit(jax.vmap(fn, axis_name=parallel.AXIS))
    state, replay = one_device(lambda key: (learn.init(key), learn.init_replay()))(key[None])
    step, found = one_device(learn.step), []
    for i, mask in enumerate(masks):
        rollout = jax.tree.map(lambda x: np.asarray(x)[None], record(like, i * STEPS, mask, i > 0))
        state, replay, told = step(state, replay, rollout, jax.random.fold_in(key, i)[None])
        found.append({name: np.asarray(told[f"policy/{name}/drawn"][0]) for name in NAMES})
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [{}, {"network": {"core": {"name": "gru", "size": 4}, "max_seq_len": 3}}],
    ids=["rows", "sequences"],
)
def test_all_policies_draw_the_same_games_and_times(more):
    # agents come and go apart: one in four rows of each is masked
    masks = np.random.default_rng(0).random((3, STEPS, SPEC.num_envs)) < 0.75
    cfg = of(OWN | ({"agent_2": {"network": {"hidden": [4]}}} if more else {}), **more)
    updates = drawn(cfg, jax.random.key(3), masks)
    there = masks.reshape(-1, GAMES, len(NAMES))
    for told in updates:
        rows = {name: x.reshape(-1, 5) for name, x in told.items()}
        for k, name in enumerate(NAMES):
            game, time, agent, reward, weight = rows[name].T
            np.testing.assert_array_equal(rows[name][:, :2], rows["agent_0"][:, :2])
            assert (agent == k).all()
            present = there[time.astype(int), game.astype(int), k]
            if not more:
                np.testing.assert_array_equal(weight > 0, present)
            # rows are the record's, as a plain list of it has them
            np.testing.assert_array_equal(reward[weight > 0], reward_of(game, time, agent)[weight > 0])
        assert len({tuple(row) for row in rows["agent_0"][:, :2]}) > 20
    assert not np.array_equal(updates[1]["agent_0"][..., :2], updates[2]["agent_0"][..., :2])


@pytest.mark.slow
def test_policies_draw_apart_unless_the_config_says_otherwise():
    masks = np.ones((3, STEPS, SPEC.num_envs), bool)
    apart = drawn(of(mode="independent"), jax.random.key(3), masks)[-1]
    pairs = [(a, b) for a in NAMES for b in NAMES if a < b]
    assert not any(np.array_equal(apart[a][:, :2], apart[b][:, :2]) for a, b in pairs)


@pytest.mark.parametrize(
    ("policies", "parts"),
    [
        ({**OWN, "agent_2": {"algo": {"name": "ppo"}}}, ["agent_2 learns by ppo", "no replay", "policies_to_train"]),
        ({**OWN, "agent_1": {"replay": {"prioritized": True}}}, ["agent_1 draws by priorities", "prioritized=false"]),
        ({**OWN, "agent_1": {"replay": {"batch_size": 32}}}, ["replay.batch_size is 64", "32 for agent_1", "same"]),
        ({**OWN, "agent_3": {"algo": {"name": "sac"}}}, ["replay.updates_per_step is", "for agent_3"]),
        (
            {**OWN, "agent_1": {"network": {"core": {"name": "gru"}}}},
            ["network.core is False for policy agent_0 and True for agent_1"],
        ),
    ],
)
def test_what_does_not_go_in_lockstep(policies, parts):
    with pytest.raises(InputError) as raised:
        of(policies)
    for part in ("multi_agent.replay_mode lockstep: ", "multi_agent.replay_mode=independent", *parts):
        assert part in str(raised.value)


def test_unequal_numbers_of_agents_do_not_go_in_lockstep():
    cfg = made(**{**REPLAY, "multi_agent": {"mapping": {"agent_0": "a", ".*": "b"}, **LOCKSTEP}})
    with pytest.raises(InputError, match=r"number of agents is 1 for policy a and 3 for b: give all"):
        multi_agent.with_agents(cfg, NAMES)
    frozen = dataclasses.replace(cfg.multi_agent, policies_to_train=("b",))
    assert multi_agent.with_agents(dataclasses.replace(cfg, multi_agent=frozen), NAMES)  # it draws nothing


def test_one_policy_has_nobody_to_keep_in_step_with():
    cfg = made(**{**REPLAY, "multi_agent": {"self_play": {"policy": "main"}, **LOCKSTEP}})
    with pytest.raises(InputError, match=r"with multi_agent\.self_play one policy learns: leave it out"):
        multi_agent.with_agents(cfg, NAMES)
    cfg = made(**{**REPLAY, "multi_agent": {"group": {"team": list(NAMES)}, **LOCKSTEP}})
    with pytest.raises(InputError, match=r"lockstep: with one team of all agents one policy learns: leave it out"):
        multi_agent.check_group(cfg.multi_agent, NAMES)


def test_rllibs_key_is_understood():
    given = {"policies": ["a", "b"], "policy_mapping_fn": "my.mod.fn", **LOCKSTEP}
    found = migrate({"env": "MultiAgentCartPole-v1", "multiagent": given}, algo="DQN").config
    assert found["multi_agent"]["replay_mode"] == "lockstep"
    built = DQNConfig().environment("MultiAgentCartPole-v1").multi_agent(policies={"a", "b"}, **LOCKSTEP)
    assert built.to_run_config().multi_agent.replay_mode == "lockstep"
    single = {"env": "CartPole-v1", "multiagent": {"replay_mode": "independent"}}
    assert "multi_agent" not in migrate(single, algo="DQN").config
    assert built.copy().multi_agent(replay_mode="independent").to_run_config().multi_agent.replay_mode == "independent"
    assert config.from_dict(config.to_dict(built.to_run_config())) == built.to_run_config()
