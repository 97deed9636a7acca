"""Exported policies with trees of observations, action masks or memory: their actions equal jrl's."""

import shutil

import numpy as np
import pytest
from export_helpers import VECTOR, load, trained
from saved import save

import jrl
from jrl.envs.history import build_history
from jrl.envs.team import joint_observation
from jrl.export import formats, policy_function
from jrl.types import Box, Dict, Discrete, EnvSpec, MultiBinary, MultiDiscrete, Tuple

MASK = ("action_mask", MultiBinary((5,)))
PARTS = Dict((("kind", Discrete(4)), ("place", Tuple((VECTOR, Box((), "int8", -9.0, 9.0)))), MASK))
FIVE = EnvSpec(VECTOR, Discrete(5), 1)
ACTION = Dict((("turn", Discrete(3)), ("push", Box((2,), "float32", -1.0, 1.0)), ("on", MultiBinary((2,)))))
TEAM = EnvSpec(joint_observation(Dict((("obs", VECTOR), ("state", Box((2,))), MASK)), 3), MultiDiscrete((5, 5, 5)), 1)
# name -> (spec of the environment, history options, overrides)
CASES = {
    "lstm": (FIVE, {}, ["network.core={name: lstm, size: 8}"]),
    "gtrxl": (FIVE, {}, ["network.core={name: gtrxl, size: 8, memory: 3, head_size: 4, mlp: 8}"]),
    "lru": (FIVE, {}, ["network.core={name: lru, size: 8, state: 4}"]),
    "masked": (EnvSpec(PARTS, MultiDiscrete((2, 3)), 1), {}, []),
    "masked_gru": (EnvSpec(PARTS, Discrete(5), 1), {}, ["network.core={name: gru, size: 8}"]),
    "privileged": (
        EnvSpec(Dict((*PARTS.items, ("state", Dict((("at", Box((2,))), ("of", Discrete(3))))))), Discrete(5), 1),
        {},
        ["network.core={name: gru, size: 8}", "network.value_inputs=[state/at, kind]"],
    ),
    "vdn": (TEAM, {}, ["algo.mixer=qmix"]),
    "pqn_gru": (TEAM, {}, ["algo.mixer=sum", "network.core={name: gru, size: 8}"]),
    # remembers the return to go
    "dt": (FIVE, {"prev_reward": True}, ["algo.target_return=9.0", "algo.return_scale=1.0", "algo.step_scale=20.0"]),
    "past": (EnvSpec(VECTOR, ACTION, 1), {"frame_stack": 3, "prev_action": True, "prev_reward": True}, []),
}
SETTINGS = {"frame_stack": "env.frame_stack", "prev_action": "network.use_prev_action"}
SETTINGS["prev_reward"] = "network.use_prev_reward"
LENGTH, N = 200, 3


def stored(directory, name):
    """A checkpoint of the case with large parameters."""
    spec, past, overrides = CASES[name]
    told = build_history(spec, **past)
    settings = [f"{SETTINGS[k]}={str(v).lower()}" for k, v in past.items()]
    seen, own = (spec, None) if told is None else (told.spec, spec.observation)
    algo = name.partition("_")[0] if spec is TEAM or name == "dt" else "ppo"
    save(directory, algo, seen, "algo.normalize_obs=true", *overrides, *settings, own=own, change=changed)


def changed(state):
    statistics, state = state.obs_stats, trained(state.replace(obs_stats=()))
    return state.replace(obs_stats=statistics)


def episodes(space, choices):
    """Yields (observation, reset, reward) of each step of 3 columns, whose episodes end at different times."""
    rng = np.random.default_rng(5)
    for t in range(LENGTH):
        obs = formats.draw_observations(rng, space, N, choices)
        yield obs, (rng.random(N) < 0.1) | (t == 0), rng.normal(size=N).astype(np.float32)


def flat(action):
    found = [action[k] for k in sorted(action)] if isinstance(action, dict) else [action]
    return np.concatenate([np.asarray(x, np.float64).reshape(len(x), -1) for x in found], 1)


QUICK = ("past",)
NOT_IN_C = ("gtrxl",) if shutil.which("cc") else tuple(CASES)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Returns a function of a case and a format: directories of its run and of its export, each made once."""
    root = tmp_path_factory.mktemp("exports")

    def export(name, format="npz"):
        run, out = root / name, root / f"{name}-{format}"
        if not run.exists():
            stored(run, name)
        if not out.exists():
            policy = policy_function.load_function(run)
            assert formats.export(policy, format=format, out=out)["agreement"] == 1.0
        return run, out

    return export


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in CASES]
)
def test_actions_are_those_of_jrl_over_episodes(made, name):
    formats_of_case = ("npz", "stablehlo") if name in NOT_IN_C else ("npz", "stablehlo", "c")
    exported = {format: load(made(name, format)[1]) for format in formats_of_case}
    run, _ = made(name)
    policy = policy_function.load_function(run)
    pi, expected = jrl.load(run), []
    for obs, reset, reward in episodes(policy.observation, policy.choices):
        expected.append(flat(pi.act(obs, reset=reset, reward=reward)))
        for other in exported.values():
            found = flat(other.act(obs, reset=reset, reward=reward))
            np.testing.assert_allclose(found, expected[-1], atol=2e-4, rtol=0)
    assert (np.std(np.concatenate(expected), 0) > 0.05).all()  # the actions depend on the inputs
    if policy.choices:
        assert pi.config.network.recurrent or exported["npz"].about["memory"] == []


def test_an_episode_after_reset(made):
    """Single observations; the policy or the caller keeps the memory."""
    pi, rng = load(made("lstm")[1]), np.random.default_rng(2)
    # memory of the policy network, without that of the value network
    assert [x["shape"] for x in pi.about["memory"]] == [[8], [8]]
    obs = [formats.draw_observations(rng, VECTOR, 1)[0] for _ in range(30)]
    first = [pi.act(x) for x in obs]
    going_on = [pi.act(x) for x in obs]
    pi.reset()
    assert [pi.act(x) for x in obs] == first != going_on
    memory, again = None, []
    for x in obs:
        action, memory = pi.step(x, memory)
        again.append(action)
    assert again == first


def test_missing_inputs_are_named(made):
    pi = load(made("past")[1])
    pi.act(np.zeros(4))
    with pytest.raises(ValueError, match="reads the previous reward"):
        pi.act(np.zeros(4))
    pi = load(made("masked")[1])
    obs = {"kind": 1, "place": (np.zeros(4), np.int8(0))}
    assert pi.act(obs, action_mask=[0, 1, 0, 0, 1]).tolist() == [1, 2]
    with pytest.raises(ValueError, match="entries 2 to 4 of a row are all 0"):
        pi.act({**obs, "action_mask": [1, 1, 0, 0, 0]})
    with pytest.raises(ValueError, match="expected a dict of action_mask, kind, place"):
        pi.act(obs)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["npz", pytest.param("stablehlo", marks=pytest.mark.slow)])
def test_parts_that_only_the_critic_reads_may_be_left_out(tmp_path, format):
    """These parts are ignored if they are given."""
    spec = CASES["privileged"][0]
    save(tmp_path / "run", "ppo", spec, "network.value_inputs=[state/at, kind]", change=changed)
    policy = policy_function.load_function(tmp_path / "run")
    assert formats.export(policy, format=format, out=tmp_path / "out")["agreement"] == 1.0
    exported = load(tmp_path / "out")
    assert sorted(exported.about["observation"]["spaces"]) == ["action_mask", "place", "state"]
    assert exported.about["unread"] == ["state/at", "kind"]
    full = formats.draw_observations(np.random.default_rng(0), spec.observation, N, policy.choices)
    part = {"place": full["place"], "action_mask": full["action_mask"], "state": {"of": full["state"]["of"]}}
    expected = jrl.load(tmp_path / "run").act(full)
    for obs in (full, part):
        np.testing.assert_array_equal(exported.act(obs), expected)
        np.testing.assert_array_equal(jrl.load(tmp_path / "run").act(obs), expected)
    mask = part.pop("action_mask")
    np.testing.assert_array_equal(exported.act(part, action_mask=mask), expected)
    np.testing.assert_array_equal(jrl.load(tmp_path / "run").act(part, action_mask=mask), expected)
    with pytest.raises(ValueError, match="obs: expected a dict of action_mask, place, state"):
        exported.act({**full, "stat": full["kind"]})
    del part["place"]
    for policy in (exported, jrl.load(tmp_path / "run")):
        with pytest.raises(ValueError, match="obs: expected a dict of"):
            policy.act(part, action_mask=mask)
