"""Environments in worker processes: the same rows as in this process; processes that raise, die, hang, and end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from env_helpers import Stepper, random_actions, run
from processes import alive, descendants, gone

from jrl import envs
from jrl.types import Discrete, InputError

RESTART = envs.OnFailure(restart=True)

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
CRASHING, STALLING = "faulty_envs:Crashing", "faulty_envs:Stalling"


def actions(steps, num_envs, seed=0):
    return random_actions(Discrete(2), steps, num_envs, seed)


def make(id, num_envs, options=None, **settings):
    return envs.make(id, backend="gymnasium", num_envs=num_envs, options=options, remote_worker_envs=True, **settings)


def pids(env):
    return env.foreach_env(lambda env: __import__("os").getpid())


def assign(env, name, values):
    """The attribute of each environment."""
    own = dict(zip(pids(env), values))
    env.foreach_env(lambda env: setattr(env.unwrapped, name, own[__import__("os").getpid()]))


def zeros(n):
    return np.zeros(n, np.int32)


# ---------------------------------------------------------------- the same rows


@pytest.mark.parametrize("kind", ["workers", "ready_workers"])
@pytest.mark.parametrize("id", ["CartPole-v1", "FrozenLake-v1"])
def test_equal_to_environments_in_this_process(id, kind):
    plan = random_actions(Discrete(2), 60, 4)
    for a, b in zip(run(id, kind, plan, seed=4), run(id, "gymnasium", plan, seed=4)):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("how", ["raise", "exit"])
def test_failures_make_the_same_rows_as_in_this_process(how):
    """The seed decides when it fails, and the restarts decide the next seed: in a new process or in the same."""
    plan, options = actions(60, 3), {"p_step": 0.03, "p_reset": 0.1}
    here = run(CRASHING, "gymnasium", plan, options=options, on_failure=RESTART)
    there = run(CRASHING, "workers", plan, options={**options, "how": how}, on_failure=RESTART)
    assert here.failed.sum() > 3
    for a, b in zip(here, there):
        np.testing.assert_array_equal(a, b)


# ---------------------------------------------------------------- failures


def test_an_exception_comes_with_the_workers_traceback():
    env = make(CRASHING, 2, {"p_step": 1.0})
    env.reset()
    with pytest.raises(RuntimeError, match=r"(?s)^\S*faulty_envs.py:\d+: ZeroDivisionError.*environment \d of 2") as e:
        env.step(zeros(2))
    assert "gym/worker.py" not in str(e.value) and "gym/worker.py" in e.value.details
    env.close()


def test_a_worker_that_ends_says_how():
    for how, said in (("exit", "exit code 3"), ("kill", "SIGKILL")):
        env = make(CRASHING, 1, {"p_step": 1.0, "how": how})
        env.reset()
        with pytest.raises(RuntimeError, match=rf"environment 0 of 1, .* its worker process \d+ ended: {said}"):
            env.step(zeros(1))
        env.close()


def test_one_that_cannot_be_made_anew_ends_the_run():
    env = make(CRASHING, 2, {"p_reset": 1.0, "how": "exit"}, on_failure=RESTART)
    with pytest.raises(RuntimeError, match=r"environment \d of 2, .* failed 11 times in a row.*exit code 3"):
        env.reset()
    env.close()


def test_kill_9_costs_an_episode_and_nothing_else():
    plan = actions(40, 3)
    calm = run("CartPole-v1", "workers", plan)
    env = make("CartPole-v1", 3, on_failure=RESTART)
    before = pids(env)
    env.reset()
    rows = [env.step(action) for action in plan[:5]]
    os.kill(before[1], signal.SIGKILL)
    rows += [env.step(action) for action in plan[5:]]
    after = pids(env)
    assert [b == a for b, a in zip(before, after)] == [True, False, True] and not alive(before[1])
    failed = np.stack([r.failed for r in rows])
    assert np.argwhere(failed).tolist() == [[5, 1]] and env.num_restarts == 1
    assert (np.abs(rows[5].obs[1]) <= 0.05).all() and rows[5].reward.tolist() == [1, 0, 1]
    obs = np.stack([r.obs for r in rows])
    np.testing.assert_array_equal(obs[:, [0, 2]], calm.obs[:, [0, 2]])
    env.close()


def test_one_that_stalls_is_made_anew_in_time():
    env = make(STALLING, 2, {"at": 3, "seconds": 60}, on_failure=envs.OnFailure(True, 1.0))
    env.reset()
    before = pids(env)
    rows = [env.step(zeros(2)) for _ in range(2)]
    rows.append(env.step(zeros(2)))  # both stall, for a minute
    assert [r.failed.tolist() for r in rows] == [[False] * 2, [False] * 2, [True] * 2] and env.num_restarts == 2
    assert not any(map(alive, before))
    env.close()


def test_one_that_stalls_without_restart_is_a_clear_error():
    env = make(STALLING, 1, {"at": 1, "seconds": 60}, on_failure=envs.OnFailure(step_timeout_s=0.2))
    env.reset()
    with pytest.raises(
        RuntimeError, match=r"environment 0 of 1, .*Stalling, failed: no answer in time .* 0.2.*SIGKILL"
    ):
        env.step(zeros(1))
    env.close()


def test_what_cannot_be_made_is_the_users_error():
    """By name, and nothing is left."""
    for options, said in (({"zz": 1}, "zz"), ({"observation": __import__("gymnasium").spaces.Text(3)}, "Text")):
        with pytest.raises(InputError, match=said):
            make("env_helpers:Spaces", 2, options)


# ---------------------------------------------------------------- the end


def test_nothing_is_left_after_close():
    make("CartPole-v1", 1).close()
    before = descendants()  # with multiprocessing's own, which end with this process
    env = make("CartPole-v1", 3, batch_wait_ms=0.0)
    env.reset()
    assert len(descendants() - before) == 3
    env.close()
    assert descendants() <= before
    env.close()


def test_one_that_hangs_is_ended_by_close():
    make("CartPole-v1", 1).close()
    before = descendants()
    env = make(STALLING, 2, {"at": 1, "seconds": 60}, batch_wait_ms=0.0)
    env.reset()
    ids = env.recv()[0]
    env.send(zeros(len(ids)), ids)
    env.close()
    assert descendants() <= before


PARENT = """
import sys, time
sys.path[:0] = {path!r}
import gymnasium, numpy as np
from jrl import envs

class Mine(gymnasium.Env):
    observation_space, action_space = gymnasium.spaces.Box(0, 9, (1,)), gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {{}}
    def step(self, action):
        time.sleep(600)

gymnasium.register("Mine-v0", entry_point=Mine)
env = envs.make("Mine-v0", backend="gymnasium", num_envs=2, remote_worker_envs=True, batch_wait_ms=0.0)
loaded = env.foreach_env(lambda env: [m for m in ("jax", "jrl.envs") if m in sys.modules])
print(loaded, *env.foreach_env(lambda env: __import__("os").getpid()), end=" ")
print(env.foreach_env(lambda env: __import__("os").getppid())[0], flush=True)
env.reset()
env.send(np.zeros(1, np.int32), env.recv()[0][:1])
time.sleep(600)
"""


def test_workers_end_with_a_parent_that_is_killed(tmp_path):
    """Also one that hangs. The parent is a script without `if __name__`, whose own class is the environment; workers
    import neither it nor jax.
    """
    script = tmp_path / "script.py"
    script.write_text(PARENT.format(path=[str(Path(__file__).parent)]))
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        *loaded, first, second, nursery = parent.stdout.readline().split()
        workers = [int(first), int(second), int(nursery)]
        assert loaded == ["[[],", "[]]"] and all(map(alive, workers))
        time.sleep(0.3)
        parent.kill()
    assert gone(*workers, seconds=60.0)


def test_ctrl_c_and_an_orderly_end_are_left_to_the_run():
    env = make("CartPole-v1", 2)
    env.reset()
    for pid in pids(env):
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    assert (env.step(zeros(2)).reward == 1).all()
    env.close()


# ---------------------------------------------------------------- those that do not wait


def test_the_others_do_not_wait_for_a_slow_one():
    env = make(STALLING, 3, {"at": 1, "seconds": 60}, batch_wait_ms=0.0)
    with pytest.raises(RuntimeError, match="no environment is under way"):
        env.recv()
    assert Stepper(env).reset().shape == (3, 2)
    with pytest.raises(RuntimeError, match="no environment is under way"):
        env.recv()
    assign(env, "_at", [1, None, None])
    env.send(zeros(1), [0])
    for _ in range(5):
        env.send(zeros(1), [2])
        ids, result = env.recv()
        assert ids.tolist() == [2] and result.reward.tolist() == [1] and result.failed is None
    for wrong in ([0], [1, 1]):
        with pytest.raises(ValueError, match=r"\[0\] are under way"):
            env.send(zeros(len(wrong)), wrong)
    env.close()


@pytest.mark.parametrize(("wait_ms", "expected"), [(0.0, [0]), (1500.0, [0, 1])])
def test_batch_wait_collects_those_that_come_soon(wait_ms, expected):
    """Environment 0 takes 0.1 s, 1 takes 0.6 s, 2 a minute."""
    env = make(STALLING, 3, {"at": 1}, batch_wait_ms=wait_ms)
    Stepper(env).reset()
    assign(env, "_seconds", [0.1, 0.6, 60])
    env.send(zeros(3), [0, 1, 2])
    assert env.recv()[0].tolist() == expected
    env.close()


def test_batch_wait_ends_when_all_have_come():
    env = make("CartPole-v1", 3, batch_wait_ms=60_000.0)
    env.reset()
    assert env.recv()[0].tolist() == [0, 1, 2]
    env.close()


def test_one_that_is_made_anew_holds_up_no_other():
    """That takes a second; the other steps on meanwhile. Then the row comes that begins an episode."""
    env = make(CRASHING, 2, {"make_s": 1.0}, batch_wait_ms=0.0, on_failure=RESTART)
    Stepper(env).reset()
    assign(env, "_p", [{"step": 1.0, "reset": 0.0}, {"step": 0.0, "reset": 0.0}])
    env.send(zeros(2), [0, 1])
    others = 0
    while True:
        ids, result = env.recv()
        assert result.failed.tolist() == [i == 0 for i in ids]
        if 0 in ids:
            break
        others += 1
        env.send(zeros(1), ids)
    assert others and env.num_restarts == 1
    assert result.reward[0] == 0 and (np.abs(result.obs[0]) <= 0.05).all()
    env.close()


def test_a_reset_in_the_middle_forgets_what_was_under_way():
    env = make("CartPole-v1", 2, batch_wait_ms=0.0)
    stepper = Stepper(env)
    stepper.reset()
    env.send(zeros(2), [0, 1])
    assert (np.abs(stepper.reset()) <= 0.05).all()
    assert (stepper.step(zeros(2)).reward == 1).all()
    env.close()


def test_foreach_env_keeps_the_results_under_way():
    env = make("CartPole-v1", 2, batch_wait_ms=0.0)
    Stepper(env).reset()
    env.send(zeros(1), [1])
    assert env.foreach_env(lambda env: env.unwrapped.gravity) == [9.8, 9.8]
    assert env.foreach_env(lambda env: b"bytes") == [b"bytes"] * 2
    ids, result = env.recv()
    assert ids.tolist() == [1] and result.reward.tolist() == [1]
    with pytest.raises(RuntimeError, match=r"(?s)environment 0 of 2, .* foreach_env.*AttributeError.*no_such"):
        env.foreach_env(lambda env: env.unwrapped.no_such)
    assert (Stepper(env).step(zeros(2)).reward == 1).all()
    env.close()
