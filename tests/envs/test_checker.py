"""check_env: faults of environments, one each, and what is said of them; and that sound ones have none."""

import subprocess
import sys
from pathlib import Path

import gymnasium
import jax.numpy as jnp
import numpy as np
import pytest

import jrl
from jrl.envs.checker import check_env, check_speed
from jrl.envs.jax_env import Definition
from jrl.errors import InputError
from jrl.types import Box, Dict, Discrete

FLAT = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)


class Sound(gymnasium.Env):
    """Random walks of 10 steps; each fault below changes one thing."""

    observation_space, action_space = FLAT, gymnasium.spaces.Discrete(2)
    count = 0  # steps since it was made

    def obs(self):
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 10
        return self.obs(), {}

    def step(self, action):
        assert self.action_space.contains(int(action))
        return self.moved()

    def moved(self):
        self.left -= 1
        self.count += 1
        return self.obs(), self.reward(), self.left == 0, False, {}

    def reward(self):
        return 1.0


class Nested(Sound):
    observation_space = gymnasium.spaces.Dict({"a": FLAT, "b": FLAT})

    def obs(self):
        return {"a": super().obs(), "b": super().obs() + (2 if self.count == 6 else 0)}


class Integers(Sound):
    """A Discrete that is given as Python's int, as most do."""

    observation_space = gymnasium.spaces.Discrete(3, start=1)
    most = 3

    def obs(self):
        return int(self.np_random.integers(1, self.most + 1))


class Fragile(Sound):
    """Takes its lowest action, and no other extreme one."""

    action_space = gymnasium.spaces.Box(-0.3, 0.1, (2,), np.float64)

    def step(self, action):
        assert self.action_space.contains(action)
        if action[0] > 0.0999:
            raise ZeroDivisionError("at full throttle")
        return self.moved()


class SelfResetting(Sound):
    """Begins anew by itself: what it returns at the end is already the first observation."""

    def obs(self):
        return np.array([self.left / 10, 0], np.float32)

    def step(self, action):
        _, reward, ended, truncated, info = super().step(action)
        if ended:
            self.left = 10
        return self.obs(), reward, ended, truncated, info


def at(count, value, other):
    """Gives `value` at a step, and `other` at all others."""
    return lambda self: value if self.count == count else other


def failing(error, where, when=lambda self: True):
    """Raises where a method of `Sound` is called."""

    def method(self, *args, **kwargs):
        if when(self):
            raise error
        return getattr(Sound, where)(self, *args, **kwargs)

    return {where: method}


def seen(fn):
    return {"obs": fn}


def changed(fn):
    """Changes what a step returns."""
    return {"step": lambda self, action: fn(*Sound.step(self, action))}


def by_context(context):
    return Sound()


array = lambda *values: np.array(values, np.float32)
SHARED = np.random.default_rng(0)  # environments of a process take from one stream of numbers
STEPS = 60
# name: (class that is changed, or the changes of Sound; the line that is expected). `test_step_faults` has more
PROBLEMS = {
    "NanReward": ({"reward": at(7, float("nan"), 1.0)}, "step 7: reward is nan: no algorithm can learn from it"),
    "OutOfBounds": (
        seen(lambda self: array(0.0, 1.5 if self.count == 3 else 0.5) + 0.1 * Sound.obs(self)),
        "step 3: observation[1] is 1.",
    ),
    "NanObs": (seen(at(4, array(0, np.inf), array(0, 0.5))), "step 4: observation[1] is inf: no network can read it"),
    "Nested": (Nested, "step 6: observation['b']["),
    "KeyMissing": (
        type("KeyMissing", (Nested,), seen(lambda self: {"a": FLAT.sample()})),
        "the first reset: observation has ['a'], but the space has ['a', 'b']",
    ),
    "NoSeed": (
        {"reset": lambda self: Sound.reset(self)},
        "reset takes no seed: declare reset(self, *, seed=None, options=None)",
    ),
    "Unseeded": (
        seen(lambda self: np.random.default_rng().uniform(-1, 1, 2).astype(np.float32)),
        "the same seed and actions gave another stream, from the first reset on: draw from self.np_random",
    ),
    "Shared": (
        seen(lambda self: SHARED.uniform(-1, 1, 2).astype(np.float32)),
        "the same seed and actions gave another stream, from the first reset on: draw from self.np_random",
    ),
    "Raising": (
        failing(ZeroDivisionError("no wind"), "reward", lambda self: self.count == 50),
        "step 54 raises ZeroDivisionError: no wind (test_checker.py:",
    ),
    "Fragile": (Fragile, "step 2 raises ZeroDivisionError: at full throttle (test_checker.py:"),
    "RaisingReset": (
        failing(KeyError("level 2"), "reset", lambda self: self.count),
        "step 11 raises KeyError: 'level 2' (test_checker.py:",
    ),
    "Unmade": (failing(FileNotFoundError("maze.txt"), "__init__"), ": FileNotFoundError: maze.txt"),
    "Unsupported": ({"observation_space": gymnasium.spaces.Text(5)}, "observation space Text(1, 5"),
}
NOTES = {
    "Doubles": (
        seen(lambda self: Sound.obs(self).astype(np.float64)),
        "the first reset: observation of float64, but the space has float32: it is converted",
    ),
    "Fixed": (seen(lambda self: array(self.left / 10, 0)), "another seed gives the same stream"),
    "Endless": (
        changed(lambda obs, reward, end, cut, info: (obs, reward, False, False, info)),
        "no episode ended within 60 steps, and no time limit is known: if episodes should end, set env.horizon",
    ),
    "SelfResetting": (SelfResetting, "the last observation of each episode is also the first of the next"),
}


def made(name):
    change = {**PROBLEMS, **NOTES}[name][0]
    return type(name, (Sound,), {**change, "__module__": __name__}) if isinstance(change, dict) else change


NanReward, Raising = made("NanReward"), made("Raising")
AtTheBound = type(
    "AtTheBound", (Sound,), seen(lambda self: array(1 + 1e-6, -1) * np.float32(self.np_random.choice([-1, 1])))
)


def speed_aside(notes):
    """Of a busy machine."""
    return [note for note in notes if "ms: " not in note]


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_problem_is_one_line_with_its_fix(name):
    report = check_env(made(name), steps=STEPS)
    assert not report.ok
    (line,) = report.problems
    assert PROBLEMS[name][1] in line and "\n" not in line


@pytest.mark.parametrize("name", NOTES)
def test_a_note(name):
    report = check_env(made(name), steps=STEPS)
    assert report.ok, report.problems
    assert any(NOTES[name][1] in note for note in report.notes), report.notes


def test_notes_on_how_long_steps_take():
    for seconds, words in (
        ([5e-4] * 60, "a step takes 0.5 ms: env.remote_worker_envs"),
        (
            [2e-5] * 54 + [4e-3] * 6,
            "6 of 60 steps and resets take 4 ms, most 0.02 ms: all environments wait for the slowest",
        ),
        ([2e-5] * 59 + [4e-3], None),
    ):
        notes = [fault.message for fault in check_speed(seconds)]
        assert len(notes) == (words is not None) and all(words in note for note in notes)


@pytest.mark.parametrize("env", [Sound, AtTheBound, Integers, by_context, lambda context: Sound()])
def test_a_sound_environment_has_no_findings(env):
    report = check_env(env, steps=STEPS)
    assert (report.problems, speed_aside(report.notes)) == ([], [])


@pytest.mark.parametrize(
    ("id", "backend"), [("CartPole-v1", "gymnasium"), ("CartPole-v1", "envpool"), ("CartPole-v1", "jax"),
                        ("Pendulum-v1", "envpool"), ("FrozenLake-v1", "gymnasium")]
)  # fmt: skip
def test_known_environments_have_no_findings(id, backend):
    report = check_env(id, backend=backend, steps=40, num_envs=3)
    assert (report.problems, speed_aside(report.notes)) == ([], [])


def walk(*, reward=lambda left: left, obs=lambda left: left[:, None], end=lambda left: left <= 0) -> Definition:
    """Counts down from 0.5 to 1 in steps of a tenth."""

    def step(left, action, draws):
        return left - 0.1, reward(left), end(left)

    start = lambda draws: 0.5 + draws[0] / 2
    return Definition(Box((1,), "float32", -1.0, 1.0), Discrete(2), None, 1, start, step, observe=obs)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, None),
        ({"reward": lambda left: jnp.log(left - 0.6)}, "reward is nan: no algorithm can learn from it"),
        ({"obs": lambda left: 2 * left[:, None]}, "outside [-1, 1]: widen the space, or clip it"),
        ({"obs": lambda left: left}, "Definition.observe (tests/envs/test_checker.py:"),
        ({"obs": lambda left: left}, "): expected float32 (2, 1), got float32 (2,): return arrays of the space"),
        ({"obs": lambda left: left[:, None].astype(jnp.int32)}, "): expected float32 (2, 1), got int32 (2, 1)"),
        ({"end": lambda left: left}, "): expected ends of bool, got float32: compare with a number"),
        ({"reward": lambda left: left + left[7, 1]}, "test_checker.py:"),
    ],
)
def test_an_environment_in_jax(changed, message):
    report = check_env(walk(**changed), steps=30)
    assert len(report.problems) == (message is not None), report.problems
    assert message is None or message in report.problems[0]
    assert message is not None or report.notes == []


def test_an_unknown_id_is_a_problem():
    (line,) = check_env("CartPole-v7").problems
    assert "env.id CartPole-v7: not in any backend: did you mean" in line


@pytest.mark.parametrize(("env", "numbers"), [(Sound(), {}), (3, {}), (Sound, {"steps": 0}), (Sound, {"num_envs": 0})])
def test_what_is_no_environment_is_refused(env, numbers):
    with pytest.raises(InputError, match="check_env: expected"):
        check_env(env, **numbers)


def test_options_reach_the_environment():
    assert "env.options.nothing: test_checker:Sound has no" in check_env(Sound, options={"nothing": 1}).problems[0]


def test_the_name_is_callable_beside_the_command_of_that_name():
    before = jrl.check_env  # the function, or the command where something has imported that
    import jrl.check_env as command

    assert command.parser().prog == "python -m jrl.check_env"
    for one in (before, jrl.check_env):
        assert one(Raising, steps=60).problems == check_env(Raising, steps=60).problems


def test_the_command(capsys):
    from jrl.check_env import main

    assert main(["test_checker:NanReward", "--steps", "20"]) == 2
    assert capsys.readouterr().out.startswith("problem: step 7: reward is nan")
    assert main(["CartPole-v1", "--backend=gymnasium", "--steps=20", "--set", "max_episode_steps=5"]) == 0
    assert capsys.readouterr().out.endswith("ok: CartPole-v1, 2 environments of 20 steps\n")
    assert main(["CartPole-v1", "--steps=0"]) == 2
    assert main(["CartPole-v1", "--set", "size"]) == 2
    assert "error: --set size: expected NAME=VALUE" in capsys.readouterr().err


def test_help_needs_no_jax():
    code = "import sys, jrl.check_env as c; c.parser(); sys.exit('jax' in sys.modules or 'gymnasium' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(jrl.__file__).parents[1]).returncode == 0


# ---------------------------------------------------------------- nested spaces and masks


class Tree(Sound):
    """Every array of the observation is looked at by its path."""

    observation_space = gymnasium.spaces.Dict(
        pose=gymnasium.spaces.Tuple([FLAT, gymnasium.spaces.MultiBinary(2)]), gear=gymnasium.spaces.Discrete(3)
    )
    action_space = gymnasium.spaces.Tuple([gymnasium.spaces.Discrete(2), gymnasium.spaces.MultiBinary(2)])
    bits = 1

    def obs(self):
        return {"pose": (super().obs(), np.array([0, self.bits], np.int8)), "gear": int(self.np_random.integers(3))}

    def step(self, action):
        assert self.action_space.contains(action)
        return self.moved()


class WrongBits(Tree):
    bits = 2


class MaskedChoice(Sound):
    """Fails by any action that its mask forbids; forbids all at `count` == `stuck`."""

    observation_space = gymnasium.spaces.Dict(x=FLAT, action_mask=gymnasium.spaces.MultiBinary(5))
    action_space = gymnasium.spaces.MultiDiscrete([3, 2])
    stuck = 10  # the last of its episode: nothing can be done there, nor need it

    def obs(self):
        mask = np.zeros(5, np.int8)
        mask[[self.count % 3, 3 + self.count % 2]] = 1
        if self.count == self.stuck and self.left < 10:
            mask[3:] = 0
        return {"x": super().obs(), "action_mask": mask}

    def step(self, action):
        assert action.tolist() == [self.count % 3, self.count % 2]
        return self.moved()


class Stuck(MaskedChoice):
    stuck = 7

    def step(self, action):
        return self.moved()


class MaskInInfo(Sound):
    def step(self, action):
        *result, _ = super().step(action)
        return (*result, {"legal": [0, 1]} if self.left < 10 else {})

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0], {"legal": [1, 0]}


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Tree, None),
        (WrongBits, "the first reset: observation['pose'][1][1] is 2, outside [0, 1]"),
        (MaskedChoice, None),
        (Stuck, "step 7: the action_mask of environment 0 allows no action for 1, but its episode goes on"),
    ],
)
def test_trees_and_masks(cls, message):
    report = check_env(cls, steps=30)
    assert [message is None or message in line for line in report.problems] == [True] * (message is not None)
    assert message is not None or speed_aside(report.notes) == []


def test_a_mask_in_the_infos():
    assert check_env(MaskInInfo, steps=30, action_mask_info="legal").ok
    (line,) = check_env(MaskInInfo, steps=30, action_mask_info="leagl").problems
    assert "env.action_mask_info leagl: the infos of" in line and "only legal" in line


def test_trees_in_jax():
    """A dict that is said to be one; then one whose parts are not what the space says."""
    parts = Dict((("left", Box((1,))), ("side", Discrete(2))))
    whole = lambda dtype: lambda left: {"left": left[:, None], "side": (left > 0.5).astype(dtype)}
    tree = walk(obs=whole(jnp.int32))._replace(observation=parts, action=Dict((("go", Discrete(2)),)))
    assert check_env(tree, steps=30).problems == []
    (line,) = check_env(tree._replace(observe=whole(jnp.int8)), steps=30).problems
    assert "['side']: expected int32 (2,), got int8 (2,): return arrays of the space" in line
    line, *_ = check_env(tree._replace(observe=lambda left: {"left": left[:, None]}), steps=30).problems
    assert "expected {'left': float32 (2, 1), 'side': int32 (2,)}, got {'left': float32 (2, 1)}" in line
