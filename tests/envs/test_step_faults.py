"""Environments that break Gymnasium's interface, or try to end the run: one clear error, in the words of check_env."""

import ast
import re
import signal
import string
from pathlib import Path

import numpy as np
import pytest

import jrl
from jrl import envs
from jrl.envs.checker import check_env
from jrl.errors import EnvironmentFailed, InputError
from jrl.gym import FIRST_STEPS
from jrl.gym import faults as env_faults
from jrl.host import interruption, machine

RESTART = envs.OnFailure(restart=True)

ID = "faulty_envs:Breaching"
HERE_AND_THERE = pytest.mark.parametrize("remote", [False, True], ids=["here", "worker"])
BREACHES = {
    "reward": "step 3: reward None is not a number: return a float",
    "text": "step 3: reward '1' is not a number: return a float",
    "array": "step 3: reward of shape (1,): return one number",
    "four": "step 3 returned 4 values: return (observation, reward, terminated, truncated, info)",
    "flag": "step 3: terminated is 2, a int: return bool(terminated)",
    "info": "step 3: info is None, a NoneType: return a dict",
    "Discrete": "step 3: observation is 3, outside [0, 2]: widen the space, or clip it",
    "dtype": "step 3: observation of float32, but the space has uint8, which drops fractions",
    "shape": "step 3: observation of shape (3,), but the space has (2,)",
    "no info": "the first reset did not return a pair: return (observation, info)",
}


def made(id=ID, what=None, remote=False, num_envs=1, **settings):
    options = {} if what is None else {"what": what}
    options |= settings.pop("options", {})
    return envs.make(id, num_envs=num_envs, options=options, remote_worker_envs=remote, **settings)


def stepped(env, steps=40):
    try:
        env.reset()
        for _ in range(steps):
            env.step(np.zeros(env.spec.num_envs, np.int32))
    finally:
        env.close()


@HERE_AND_THERE
def test_a_breach_has_the_words_of_check_env(remote):
    for what, words in BREACHES.items():
        if remote and what not in ("four", "Discrete", "no info"):
            continue  # a process each
        with pytest.raises(InputError) as e:
            stepped(made(what=what, remote=remote, on_failure=envs.OnFailure(restart=what == "four")))
        assert str(e.value).startswith(f"env.id {ID}: environment 0: {words}")
        if not remote:
            (line,) = check_env(ID, options={"what": what}, num_envs=1, steps=5).problems
            assert str(e.value).endswith(line)


@HERE_AND_THERE
@pytest.mark.parametrize("name", ["Bare", "InJax"])
def test_flags_of_any_form_and_a_class_without_the_base(name, remote):
    if remote and name == "InJax":
        pytest.skip("the conversion is the same in a process, which would import jax first")
    env = made(f"faulty_envs:{name}", remote=remote)
    env.reset()
    rows = [env.step(np.zeros(1, np.int32)) for _ in range(40)]  # beyond the steps that are looked at closely
    env.close()
    ends = [t for t, row in enumerate(rows, 1) if row.truncated.item()]
    assert ends == [8, 17, 26, 35] and not any(row.terminated.item() for row in rows)
    assert remote or check_env(f"faulty_envs:{name}", num_envs=1, steps=20).ok


@HERE_AND_THERE
def test_a_vector_is_no_environment(remote):
    with pytest.raises(InputError) as e:
        made("faulty_envs:two_at_once", remote=remote)
    words = "the environment cannot be made: expected one environment, got a CartPoleVectorEnv of several: name"
    assert str(e.value).startswith(f"env.id faulty_envs:two_at_once: {words}")
    assert envs.check("gymnasium.vector:SyncVectorEnv")[0].endswith("set env.num_envs")


@HERE_AND_THERE
def test_a_breach_below_a_horizon_is_the_same(remote):
    with pytest.raises(InputError, match="step 3 returned 4 values"):
        stepped(made(what="four", remote=remote, horizon=10))


@HERE_AND_THERE
def test_a_reset_without_seed(remote):
    with pytest.raises(InputError, match=r"env.id faulty_envs:Unseeded: environment 0: reset takes no seed: declare"):
        stepped(made("faulty_envs:Unseeded", remote=remote))


@HERE_AND_THERE
def test_a_breach_in_later_steps_is_a_failure_in_the_same_words(remote):
    late = {"at": FIRST_STEPS + 3}
    for what, words in BREACHES.items():
        if what in ("no info", "Discrete") or (remote and what not in ("four", "reward")):
            continue  # no step, and too dear to look at
        with pytest.raises(EnvironmentFailed, match="^ValueError: " + re.escape(words.replace("step 3", "a step"))):
            stepped(made(what=what, remote=remote, options=late))
    env = made(what="four", remote=remote, options=late, on_failure=RESTART)
    stepped(env)
    assert env.num_restarts == 1


def test_observations_that_no_memory_holds(monkeypatch):
    monkeypatch.setattr(machine, "free_bytes", lambda: 4 * 10**6)
    huge = "env.id faulty_envs:Huge: observation['map'] of shape (1000, 1000) takes 4.0 MB; two observations for each "
    message = huge + "of 1 environments take 8.0 MB, but 4.0 MB are free: make it smaller"
    with pytest.raises(InputError) as e:
        made("faulty_envs:Huge")
    assert str(e.value) == message
    assert check_env("faulty_envs:Huge", num_envs=1).problems == [message]
    monkeypatch.setattr(machine, "free_bytes", lambda: 64 * 10**6)
    with pytest.raises(InputError, match=r"take 72.0 MB, but .* or use at most 7 environments"):
        made("faulty_envs:Huge", num_envs=9)


def test_only_the_first_steps_are_looked_at(monkeypatch):
    """And floats a little out of their bounds, or not finite, are no reason to end a run."""
    looked = []
    for name in ("check_reset", "check_step"):
        real = getattr(env_faults, name)
        spy = lambda space, result, where, real=real: looked.append(where) or real(space, result, where)
        monkeypatch.setattr(env_faults, name, spy)
    stepped(made(what="bounds"), steps=100)
    assert looked[0] == "the first reset" and looked[-1] == f"step {FIRST_STEPS}"
    assert len(looked) == 1 + FIRST_STEPS + 1  # with the reset after the first episode
    looked.clear()
    stepped(made(what="bounds", on_failure=envs.OnFailure(check_steps=0)))
    assert looked == []


@pytest.mark.parametrize(
    ("what", "remote"),
    [("SystemExit", False), ("KeyboardInterrupt", False), ("Panic", False), ("SystemExit", True)],
)
def test_an_environment_has_no_say_in_when_the_run_ends(what, remote):
    words = rf"^\S*faulty_envs.py:\d+: {what}"
    for at in ("reset", 5):
        with pytest.raises(
            EnvironmentFailed, match=words + r"(?s:.*)environment 0 of 1, faulty_envs:Breaching, failed"
        ):
            stepped(made(what=what, remote=remote, options={"at": at}))
    with pytest.raises(
        InputError, match=rf"^env.id {ID}: the environment cannot be made with .*faulty_envs.py:\d+: {what}"
    ):
        made(what=what, remote=remote, options={"at": "constructor"})
    env = made(what=what, remote=remote, options={"at": 5}, num_envs=2, on_failure=RESTART)
    stepped(env)
    assert env.num_restarts > 2


def test_check_env_tells_of_an_environment_that_would_end_it():
    for at, where in (
        ("constructor", "the environment cannot be made"),
        ("reset", "the first reset raises"),
        (5, "step 5 raises"),
    ):
        (line,) = check_env(ID, options={"what": "SystemExit", "at": at}, num_envs=1).problems
        assert where in line and "SystemExit: bye" in line


def test_ctrl_c_is_the_users():
    """Python's own handler, one of the program's, and that of a run, which waits for the second."""
    before = signal.getsignal(signal.SIGINT)

    def handler(number, frame):
        raise KeyboardInterrupt

    try:
        for one in (signal.default_int_handler, handler):
            signal.signal(signal.SIGINT, one)
            with pytest.raises(KeyboardInterrupt):
                stepped(made("faulty_envs:Interrupted"))
    finally:
        signal.signal(signal.SIGINT, before)
    with interruption.watch_signals() as interrupted:
        stepped(made("faulty_envs:Interrupted"))
    assert interrupted.number == signal.SIGINT


@HERE_AND_THERE
def test_a_type_error_of_the_constructors_body_is_none_of_its_options(remote):
    with pytest.raises(InputError) as e:
        made(what="TypeError", remote=remote)
    assert "faulty_envs.py:" in str(e.value) and "TypeError: object of type 'int' has no len()" in str(e.value)
    assert str(e.value).startswith(f"env.id {ID}: ")
    with pytest.raises(InputError, match=rf"^env.options.whta: {ID} has no such option: did you mean what\?$"):
        made(options={"whta": "TypeError"}, remote=remote)


def test_arrays_without_elements_are_refused(tmp_path):
    for remote in (False, True):
        with pytest.raises(
            InputError, match=rf"env.id {ID}: observation has shape \(0,\), no elements: add an element"
        ):
            made(what="empty", remote=remote)
    (line,) = check_env(ID, options={"what": "empty"}).problems
    assert "observation has shape (0,), no elements" in line


def test_a_module_that_fails_is_told_with_its_line(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name, text, words in (
        ("needs_other", "import no_such.part", r"needs_other.py:1: ModuleNotFoundError: .*pip install no_such$"),
        ("has_typo", "\nx = 1 +", r"has_typo.py:2: SyntaxError: invalid syntax"),
        ("ends", "import sys\nsys.exit('no licence')", r"ends.py:2: SystemExit: no licence"),
    ):  # fmt: skip
        (tmp_path / f"{name}.py").write_text(text)
        with pytest.raises(InputError, match=rf"env.id {name}:Env: cannot import {name}: \S*{words}"):
            made(f"{name}:Env")


def test_each_fault_of_the_table_is_found_somewhere_and_gets_the_values_of_its_text():
    table, used = env_faults.RUN | env_faults.CHECK | env_faults.NOTE, set()
    for file in ("gym/faults.py", "gym/interfaces.py", "envs/checker.py"):
        for call in ast.walk(ast.parse((Path(jrl.__file__).parent / file).read_text())):
            name = ast.unparse(call.func).rpartition(".")[2] if isinstance(call, ast.Call) else ""
            if name not in ("fault", "_per_agent") or not isinstance(call.args[0], ast.Constant):
                continue
            given = (
                {keyword.arg for keyword in call.keywords} | {"where"} | ({"agent"} if name == "_per_agent" else set())
            )
            wanted = {field for _, field, _, _ in string.Formatter().parse(table[call.args[0].value]) if field}
            if None not in given:  # **values
                assert wanted <= given, (call.args[0].value, wanted - given)
            used.add(call.args[0].value)
    assert used | {"range", "bounds", "raises", "cannot step"} == set(table)
