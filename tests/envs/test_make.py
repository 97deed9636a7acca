"""Ids, backends, options: what is wrong is named together with the mend; a user's own class works."""

import itertools

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from env_helpers import Countdown, Stepper

from jrl import envs, errors
from jrl.envs.jax_env import Definition
from jrl.envs.multi_agent import MultiDefinition
from jrl.types import Box, Discrete, InputError, JaxEnv

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:gymnasium", "ignore:.*fork.*")
box, discrete = gymnasium.spaces.Box, gymnasium.spaces.Discrete


def make_error(id, **kwargs):
    with pytest.raises(InputError) as caught:
        envs.make(id, **{"num_envs": 2, **kwargs})
    return list(caught.value.errors)


# ---------------------------------------------------------------- errors

ERRORS = [  # id, backend, options, what each message must say
    ("CartPole-v2", "auto", {}, [["CartPole-v2", "did you mean", "CartPole-v1"]]),
    ("Catch-v1", "jax", {}, [["Catch-v1", "not in any backend", "Catch-v0"]]),
    ("qqqq", "auto", {}, [["qqqq", "EnvPool or Gymnasium", "package.module:Class"]]),
    ("CartPole-v1", "envpol", {}, [["env.backend", "auto, envpool, gymnasium, jax", "'envpol'"]]),
    ("StatelessCartPole-v1", "envpool", {}, [["StatelessCartPole-v1", "the envpool backend", "env.backend jax"]]),
    ("StatelessCartPole-v1", "gymnasium", {}, [["the gymnasium backend", "env.backend jax"]]),
    ("Pong-v5", "jax", {}, [["Pong-v5", "the jax backend", "env.backend envpool"]]),
    ("env_helpers:Countdown", "envpool", {}, [["env_helpers:Countdown", "env.backend gymnasium"]]),
    ("gymnax:CartPole-v1", "gymnasium", {}, [["gymnax:CartPole-v1", "env.backend jax"]]),
    ("CartPole-v1", "envpool", {"max_episode_step": 9}, [["max_episode_step:", "did you mean max_episode_steps?"]]),
    (
        "CartPole-v1",
        "envpool",
        {"num_envs": 3, "seed": 1, "zzz": 1},
        [
            ["env.options.num_envs", "env.num_envs"],
            ["env.options.seed", "run.seed"],
            ["env.options.zzz", "num_threads"],
        ],
    ),
    ("CartPole-v1", "jax", {"zz": 1}, [["env.options.zz", "CartPole-v1", "it takes max_episode_steps"]]),
    (
        "RepeatAfterMe-v0",
        "jax",
        {"dela": 1, "qqqq": 1},
        [["env.options.dela", "did you mean delay?"], ["max_episode_steps, delay, episode_length"]],
    ),
    ("CartPole-v1", "jax", {"num_envs": 1, "a": 2}, [["env.options.num_envs"], ["env.options.a"]]),
    ("CartPole-v1", "gymnasium", {"vectorization": "async"}, [["options.vectorization", "env.remote_worker_envs"]]),
    ("CartPole-v1", "envpool", {"batch_size": 1}, [["env.options.batch_size", "env.batch_size"]]),
    (
        "no_such_module:Env",
        "auto",
        {},
        [["no_such_module:Env", "cannot import no_such_module", "start the command in the folder of no_such_module"]],
    ),
    (":Env", "auto", {}, [[":Env", "cannot import"]]),
    ("env_helpers:Missing", "auto", {}, [["env_helpers:Missing", "has no Missing", "class or function"]]),
    ("CartPole-v1", "jax", {"max_episode_steps": 0}, [["env.options.max_episode_steps", "positive integer", "0"]]),
    (
        "CartPole-v1",
        "jax",
        {"max_episode_steps": "9"},
        [["env.options.max_episode_steps", "positive integer", "'9'"]],
    ),
    ("RepeatAfterMe-v0", "jax", {"delay": -1}, [["env.options", "delay >= 0", "-1"]]),
    ("TicTacToe-v1", "auto", {"max_episode_steps": 9}, [["env.options.max_episode_steps", "beyond it: leave it out"]]),
]


@pytest.mark.parametrize(("id", "backend", "options", "expected"), ERRORS)
def test_an_error_names_the_thing_and_the_mend(id, backend, options, expected, monkeypatch):
    errors = make_error(id, backend=backend, options=options)
    assert len(errors) == len(expected)
    for error, parts in zip(errors, expected):
        assert all(part in error for part in parts), error
    # `check` says the same, and makes nothing
    import envpool

    for maker in ((envpool, "make"), (gymnasium, "make")):
        monkeypatch.setattr(*maker, lambda *a, **k: pytest.fail("an environment was made"))
    assert envs.check(id, backend=backend, options=options) == errors


@pytest.mark.parametrize(
    ("id", "backend", "options"),
    [
        ("CartPole-v1", "auto", None),
        ("CartPole-v1", "envpool", {"max_episode_steps": 9, "num_threads": 1}),
        ("RepeatAfterMe-v0", "jax", {"delay": 3, "max_episode_steps": 9}),
        ("CartPole-v1", "gymnasium", {"render_mode": "rgb_array"}),
        ("env_helpers:Countdown", "auto", {"start": 2}),
    ],
)
def test_check_finds_nothing_wrong(id, backend, options):
    made = len(Countdown.made)
    assert envs.check(id, backend=backend, options=options) == []
    assert len(Countdown.made) == made


remote = {"remote_worker_envs": True}
again, late = envs.OnFailure(restart=True), envs.OnFailure(restart=True, step_timeout_s=9.0)
SETTINGS = [  # id, backend, settings, what each message must say
    ("CartPole-v1", "gymnasium", {"batch_size": 2}, [["env.batch_size", "only EnvPool", "gymnasium backend"]]),
    ("Catch-v0", "jax", {"batch_size": 2}, [["env.batch_size", "only EnvPool", "jax backend"]]),
    ("CartPole-v1", "envpool", {"batch_size": 0}, [["env.batch_size", "at least 1", "0"]]),
    ("CartPole-v1", "auto", {"num_envs": 0}, [["env.num_envs: expected a whole number in [1, 16777216], got 0"]]),
    ("CartPole-v1", "auto", {"frame_stack": 2.5}, [["env.frame_stack: expected a whole number", "2.5"]]),
    ("CartPole-v1", "auto", {"frame_stak": 2}, [["unknown key env.frame_stak", "env.frame_stack"]]),
    ("CartPole-v1", "envpool", {"batch_size": 5}, [["env.batch_size: expected at most env.num_envs = 4, got 5"]]),
    ("CartPole-v1", "auto", remote, [["env.remote_worker_envs", "the envpool backend", "env.backend gymnasium"]]),
    ("StatelessCartPole-v1", "auto", remote, [["env.remote_worker_envs", "the jax backend", "leave it out"]]),
    ("CartPole-v1", "gymnasium", {"batch_wait_ms": 1.0}, [["env.batch_wait_ms", "env.remote_worker_envs"]]),
    ("CartPole-v1", "gymnasium", {"batch_wait_ms": -1.0, **remote}, [["env.batch_wait_ms", "[0, 1000000000]", "-1.0"]]),
    ("CartPole-v1", "gymnasium", {"on_failure": late}, [["env_step_timeout_s", "env.remote_worker_envs"]]),
    ("CartPole-v1", "auto", {"on_failure": again}, [["restart_failed_sub_environments", "env.backend gymnasium"]]),
    ("Catch-v0", "jax", {"on_failure": again}, [["restart_failed_sub_environments", "the jax backend"]]),
    (  # all at once, with what is wrong elsewhere
        "CartPole-v1",
        "envpool",
        {"batch_size": 9, "batch_wait_ms": 1.0, "options": {"zz": 1}, **remote},
        [["env.batch_size: expected"], ["env.remote_worker_envs"], ["env.options.zz"]],
    ),
]


@pytest.mark.parametrize(("id", "backend", "settings", "expected"), SETTINGS)
def test_settings_that_do_not_go_together(id, backend, settings, expected):
    settings = {"num_envs": 4, **settings}
    errors = make_error(id, backend=backend, **settings)
    assert len(errors) == len(expected)
    for error, parts in zip(errors, expected):
        assert all(part in error for part in parts), error
    assert envs.check(id, backend=backend, **settings) == errors


def test_settings_that_go_together():
    """And what they make: with all environments in a batch, EnvPool's wait for each other."""
    for settings, members in (
        ({"backend": "envpool", "batch_size": 4, "host": True}, ["step"]),
        ({"backend": "envpool", "batch_size": 3}, ["recv", "batch_size", "least"]),
        ({"backend": "gymnasium", "on_failure": again}, ["step", "foreach_env", "num_restarts"]),
        (
            {"backend": "gymnasium", "batch_wait_ms": 0.0, "on_failure": late, **remote},
            ["recv", "foreach_env"],
        ),
    ):
        checked = {k: v for k, v in settings.items() if k != "host"}
        assert envs.check("CartPole-v1", num_envs=4, **checked) == []
        env = envs.make("CartPole-v1", num_envs=4, **settings)
        env.close()
        assert all(hasattr(env, name) for name in members), settings
        assert hasattr(env, "step") != hasattr(env, "recv")


def test_options_that_only_the_constructor_knows():
    """Gymnasium's options are the constructor's own: known only when it is called."""
    for id, settings in itertools.product(("CartPole-v1", "env_helpers:Countdown"), ({}, remote)):
        (error,) = make_error(id, backend="gymnasium", options={"strat": 2}, **settings)
        assert error.startswith("env.options") and id in error and "strat" in error


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"action": gymnasium.spaces.Text(3)}, ["action space Text", "use Discrete"]),
        ({"action": box(0, np.iinfo(np.int32).max, (2,), np.int32)}, ["action space Box", "2147483648 choices"]),
        ({"action": gymnasium.spaces.Dict(a=discrete(2), b=gymnasium.spaces.Text(3))}, ["action['b'] space Text"]),
        ({"action": gymnasium.spaces.Tuple([])}, ["action: the space is empty"]),
        ({"observation": gymnasium.spaces.Text(3)}, ["observation space Text", "use Box", "TransformObservation"]),
        (
            {"observation": gymnasium.spaces.Tuple([discrete(2), gymnasium.spaces.Dict(x=gymnasium.spaces.Text(3))])},
            ["observation[1]['x'] space Text"],
        ),
        ({"observation": gymnasium.spaces.Sequence(discrete(2))}, ["observation space Sequence"]),
        ({"observation": gymnasium.spaces.Dict()}, ["observation: the space is empty"]),
        ({"observation": gymnasium.spaces.Dict({1: discrete(2)})}, ["observation: names of a Dict"]),
    ],
)
def test_unsupported_spaces(options, parts):
    (error,) = make_error("env_helpers:Spaces", options=options)
    assert all(part in error for part in parts), error


# ---------------------------------------------------------------- backends


def test_auto_asks_envpool_then_gymnasium_then_graph():
    assert envs.resolve("CartPole-v1") == "envpool"
    assert envs.resolve("Taxi-v4") == "gymnasium"
    assert envs.resolve("StatelessCartPole-v1") == "jax"
    assert envs.resolve("env_helpers:Countdown") == "gymnasium"
    assert envs.resolve("brax:ant") == envs.resolve("gymnax:CartPole-v1") == "jax"
    assert [envs.resolve("CartPole-v1", b) for b in envs.BACKENDS] == list(envs.BACKENDS)


def test_host_keeps_envpool_out_of_the_program():
    for host in (False, True):
        env = envs.make("Pendulum-v1", num_envs=1, host=host)
        assert isinstance(env, JaxEnv) != host
        env.close()


# ---------------------------------------------------------------- a user's own


@pytest.mark.parametrize("remote", [False, True])
def test_a_users_class_with_options(remote):
    """Counts 2, 1, 0: rewards are what is left; the final observation is 0, the row after it resets to 2."""
    env = envs.make("env_helpers:Countdown", num_envs=3, options={"start": 2}, remote_worker_envs=remote)
    assert env.spec.observation == Box((1,), "float32", 0.0, 2.0)
    assert env.spec.action == Discrete(2) and env.spec.max_episode_steps is None
    assert env.foreach_env(lambda env: type(env).made[-1]) == [{"start": 2}] * 3
    stepper = Stepper(env)
    assert stepper.reset().tolist() == [[2.0]] * 3
    rows = [stepper.step(np.zeros(3, np.int32)) for _ in range(5)]
    env.close()
    assert [r.obs[:, 0].tolist() for r in rows] == [[x] * 3 for x in (1.0, 0.0, 2.0, 1.0, 0.0)]
    assert [r.reward.tolist() for r in rows] == [[x] * 3 for x in (1.0, 0.0, 0.0, 1.0, 0.0)]
    assert [r.terminated.tolist() for r in rows] == [[x] * 3 for x in (False, True, False, False, True)]
    assert not any(r.truncated.any() for r in rows)
    assert rows[0].reward.dtype == np.float32


def test_a_registered_id_of_a_module():
    """Gymnasium's own form `module:Id-v0`: the module is imported for the ids that it registers."""
    gymnasium.register("Countdown-v0", entry_point=Countdown, max_episode_steps=2)
    try:
        env = envs.make("env_helpers:Countdown-v0", num_envs=1, options={"start": 5})
        assert env.spec.max_episode_steps == 2
        stepper = Stepper(env)
        stepper.reset()
        last = [stepper.step(np.zeros(1, np.int32)) for _ in range(2)][-1]
        env.close()
    finally:
        del gymnasium.registry["Countdown-v0"]
    assert last.truncated.tolist() == [True] and last.terminated.tolist() == [False] and last.obs.tolist() == [[3.0]]


def test_a_box_without_bounds_on_one_side_is_kept():
    space = gymnasium.spaces.Box(np.float32([0, -np.inf]), np.float32([np.inf, 5]))
    env = envs.make("env_helpers:Spaces", num_envs=1, options={"observation": space})
    env.close()
    assert env.spec.observation == Box((2,), "float32", (0.0, -np.inf), (np.inf, 5.0))


# ---------------------------------------------------------------- functions of the user's that jax traces


def walk(fault: str = "none") -> Definition:
    """Counts down from a draw; one function has a fault."""

    def reset(draws):
        return draws[9] + undefined if fault == "reset" else draws[0]  # noqa: F821  the fault

    def step(left, action, draws):
        match fault:
            case "step":
                left = shifted(left)
            case "branch":
                left = left - 0.1 if left > 0 else left
            case "two":
                return left, left
            case "state":
                left = (left, left)
            case "state shape":
                left = left.sum()
        reward = jnp.stack([left, left]) if fault == "reward" else jnp.zeros(())
        return left, reward, (jnp.zeros(1) if fault == "end" else jnp.zeros(1, bool))

    def observe(left):
        match fault:
            case "observe":
                raise KeyError("wind")
            case "shape":
                return left
            case "dtype":
                return left[:, None] > 0
            case "tree":
                return {"left": left[:, None]}
        return left[:, None]

    return Definition(Box((1,)), Discrete(2), None, 1, reset, step, observe)


def shifted(left):
    return left @ jnp.zeros((7, 2))


def pair(fault: str = "none") -> MultiDefinition:
    """The same for two agents, whose functions see [G, 2]."""
    one = walk(fault)
    both = lambda tree: jax.tree.map(lambda x: jnp.stack([x, x], 1), tree)

    def step(left, actions, draws):
        found = one.step(left, actions, draws)
        return found if len(found) < 3 else (found[0], jnp.zeros((3, 2)), jnp.zeros((3, 2), found[2].dtype))

    return MultiDefinition(
        ("a", "b"), one.observation, one.action, None, 1, one.reset, step, lambda left: both(one.observe(left))
    )


LINE = r"^(tests/envs/)?test_make.py:\d+: "
FAULTS = {
    "reset": LINE + r"NameError: name 'undefined'(?s:.*), in reset: (?s:.*)\nenv.id .*: its reset fails: ",
    "step": LINE + r"TypeError: dot_general(?s:.*), in step: .*\n.*, in shifted: .*\nenv.id .*: its step fails: ",
    "branch": LINE + r"\w+: (?s:.*)\nenv.id .*: its step fails: jax traces it with arrays of all environments",
    "observe": LINE + r"KeyError: 'wind'(?s:.*), in observe: ",
    "two": r"Definition.step \(.*test_make.py:\d+\): expected \(state, reward, end\), got 2 values: return all three",
    "state": r"Definition.step .*: expected a state as reset returns it, float32 \(3,\), .* got \(float32 \(3,\), f",
    "state shape": r"Definition.step .*: expected a state as reset returns it, .* got float32 \(\): return",
    "reward": r"expected rewards of shape \(3,\), got \(2, 3\): return one number per environment",
    "end": r"Definition.step .*: expected ends of bool, got float32: compare",
    "shape": r"Definition.observe .*: expected float32 \(3, (2, )?1\), got float32 \(3(, 2)?,?\): return arrays of",
    "dtype": r"Definition.observe .*: expected float32 \(3, (2, )?1\), got bool \(3, (2, )?1\)",
    "tree": r"Definition.observe .*: expected float32 \(3, (2, )?1\), got {'left': float32 \(3, (2, )?1\)}",
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("id", ["walk", "pair"])
def test_a_fault_in_functions_that_jax_traces_is_found_before_a_run(id, fault):
    if (id, fault) == ("pair", "reward"):
        pytest.skip("`test_multi_agent` has it")
    with pytest.raises(InputError, match=FAULTS[fault]) as e:
        envs.make(f"test_make:{id}", num_envs=3, options={"fault": fault})
    assert "test_make.py:" in str(e.value) or fault == "reward"
    raised = fault in ("reset", "step", "branch", "observe")
    assert ("Traceback" in errors.details(e.value)) == raised  # what -v shows


def test_an_environment_of_traced_functions_without_a_fault():
    for id, columns in (("walk", 3), ("pair", 6)):
        env = envs.make(f"test_make:{id}", num_envs=3)
        state, obs = jax.jit(env.reset)(jax.random.key(0))
        result = jax.jit(env.step)(state, jnp.zeros(columns, jnp.int32), jax.random.key(1))[1]
        assert obs.shape == result.obs.shape == (columns, 1) and result.reward.shape == (columns,)
