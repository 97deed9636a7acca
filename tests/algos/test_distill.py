"""Distillation against a plain record: the teacher's labels, the loss by numpy, who acts, what the student reads."""

import functools
import shutil

import fakes
import jax
import numpy as np
import pytest
from cases import some_quick
from fakes import assert_close, assert_same

import jrl
from jrl import evaluate, train
from jrl.algos import distill, dqn, ppo, sac, td3
from jrl.algos.exploration import EpsilonGreedy, OrnsteinUhlenbeck
from jrl.errors import InputError
from jrl.fields.hyper import Gru
from jrl.networks import NetworkConfig
from jrl.rollout import unroll
from jrl.types import TEACHER, Box, Dict, Discrete, EnvSpec

KEY = jax.random.key(3)
CHOICES, BOX = Discrete(3), Box((2,), low=-1.0, high=1.0)
PRIVILEGED = Dict((("x", Box((3,))), ("task", Box((2,)))))
NETWORK = NetworkConfig(hidden=(8,), value_inputs=("task",))
MEMORY = NetworkConfig(hidden=(8,), value_inputs=("task",), core=Gru(size=6), max_seq_len=4)
ONE_STEP = {"num_epochs": 1, "num_minibatches": 1}


def spec(action=CHOICES):
    return EnvSpec(PRIVILEGED, action, fakes.COLUMNS)


def made(network=NETWORK, action=CHOICES, teacher=None, **options):
    """(Algo, its State, the teacher, the second of two rollouts of a world whose episodes end)."""
    teacher = teacher or fakes.teacher(spec(action))
    algo = distill.make(distill.Config(**options), spec(action), network, teacher=teacher)
    state = fakes.perturbed(fakes.made_up_state(algo))
    return algo, state, teacher, fakes.rollouts(algo, spec(action), algo.actor(state))[1]


def distributions(algo, actor, memory, rollout):
    """A policy's distributions, a step at a time; its memory is that of an episode's start after a masked row."""
    choice = jax.jit(functools.partial(algo.choice, explore=True))
    start, found = algo.carry(fakes.COLUMNS), []
    for mask, obs in zip(rollout.mask, unstacked(rollout.obs), strict=True):
        dist, memory = choice(actor, obs, memory)
        memory = unroll.reset_where(~mask, start, memory)
        found.append(jax.device_get(dist))
    return found


def unstacked(tree):
    return [jax.tree.map(lambda x, t=t: x[t], tree) for t in range(len(jax.tree.leaves(tree)[0]))]


def test_labels_are_those_of_a_teacher_with_memory_that_steps_along():
    _, _, teacher, rollout = made(student_acts=0.5)
    found = distributions(teacher.algo, teacher.actor, rollout.carry.teacher, rollout)
    for label, dist in zip(unstacked(rollout.extras[TEACHER]), found, strict=True):
        np.testing.assert_allclose(label.logits, dist.logits, rtol=1e-4, atol=1e-5)
    assert not np.asarray(rollout.mask).all()  # episodes ended


@pytest.mark.parametrize("network", [NETWORK, MEMORY], ids=["without memory", "gru"])
@pytest.mark.parametrize(
    ("action", "loss"), some_quick([(CHOICES, "kl"), (Box((2,)), "kl"), (Box((2,)), "mse")], (Box((2,)), "kl")), ids=str
)
def test_the_loss_is_that_of_numpy_over_unmasked_rows(network, action, loss):
    """The student's distribution is that of acting, a step at a time."""
    algo, state, _, rollout = made(network, action, loss=loss, **ONE_STEP)
    _, aux = jax.jit(algo.update)(state, rollout, KEY)
    student = distill.make(distill.Config(loss=loss), spec(action), network)
    dists = distributions(student, algo.actor(state), rollout.carry.student, rollout)
    errors = []
    for mine, its in zip(dists, unstacked(jax.device_get(rollout.extras[TEACHER])), strict=True):
        if loss == "mse":
            errors.append(((mine.mean - its.mean) ** 2).mean(-1))
        elif action is CHOICES:
            log_p, log_q = (x.logits - np.log(np.exp(x.logits).sum(-1, keepdims=True)) for x in (its, mine))
            errors.append((np.exp(log_p) * (log_p - log_q)).sum(-1))
        else:
            ratio = np.exp(its.log_std - mine.log_std)
            distance = (its.mean - mine.mean) / np.exp(mine.log_std)
            errors.append((0.5 * (ratio**2 + distance**2 - 1.0) - np.log(ratio)).sum(-1))
    expected = np.stack(errors)[np.asarray(rollout.mask)].mean()
    np.testing.assert_allclose(aux.metrics["loss/policy"], expected, rtol=1e-4)


@pytest.mark.parametrize("action", some_quick([CHOICES, BOX], BOX), ids=str)
def test_the_student_acts_or_the_teacher_by_its_best_action(action):
    share = {}
    for student_acts in (0.0, 0.5, ((0, 1.0), (10, 0.0))):
        _, _, _, rollout = made(action=action, student_acts=student_acts)
        best = np.asarray(rollout.extras[TEACHER].mode())
        share[student_acts] = np.mean(np.asarray(rollout.action).reshape(-1) == best.reshape(-1))
    assert share[0.0] == 1.0
    assert share[((0, 1.0), (10, 0.0))] < share[0.5] < 1.0  # no step was learned from yet
    algo, state, _, _ = made(action=action)
    alone = distill.make(distill.Config(), spec(action), NETWORK)
    obs = fakes.observations(np.random.default_rng(0), PRIVILEGED, (4,))
    actions = [a.act(a.actor(state), obs, a.carry(4), KEY).action for a in (algo, alone)]
    assert_same(*actions)


@pytest.mark.parametrize("network", [NETWORK, MEMORY], ids=["without memory", "gru"])
def test_the_student_does_not_read_what_its_teacher_reads(network):
    algo, state, _, _ = made(network)
    obs = fakes.observations(np.random.default_rng(0), PRIVILEGED, (4,))
    other = {**obs, "task": -obs["task"]}
    act = jax.jit(lambda obs: algo.act(algo.actor(state), obs, algo.carry(4), KEY))
    assert_same(act(obs).carry.student, act(other).carry.student)
    assert_same(act(obs).action, act(other).action)
    assert fakes.differ(act(obs).extras[TEACHER], act(other).extras[TEACHER])


def test_it_learns_a_teacher_that_needs_memory():
    """The student does not see the task: it learns the mean of the labels over the task."""
    algo, state, _, rollout = made(MEMORY, Box((2,)), lr=1e-2, normalize_obs=True)
    update, losses = jax.jit(algo.update), []
    for i in range(20):
        state, aux = update(state, rollout, jax.random.fold_in(KEY, i))
        losses.append(float(aux.metrics["loss/policy"]))
    assert losses[-1] < 0.1 * losses[0]


def acting(module, env_spec, network=NETWORK, **options):
    algo = module.make(module.Config(**options), env_spec, network)
    return distill.Teacher(algo, algo.actor(fakes.made_up_state(algo)), env_spec)


TEACHERS = {
    "ppo": (ppo, BOX, {}),
    "sac": (sac, BOX, {}),
    "td3": (td3, BOX, {}),
    "dqn": (dqn, CHOICES, {"exploration": EpsilonGreedy(epsilon=0.1)}),
}


@pytest.mark.parametrize("name", some_quick(TEACHERS, "sac", "dqn"))
def test_teachers_of_other_algorithms(name):
    """SAC's mode is squashed, TD3's is its action, DQN's is the best Q value among actions as it explores."""
    module, action, options = TEACHERS[name]
    network = NETWORK if name != "dqn" else NetworkConfig(hidden=(8,))
    teacher = acting(module, spec(action), network, **options)
    loss = "mse" if name == "sac" else "kl"
    algo, state, _, rollout = made(action=action, teacher=teacher, loss=loss, **ONE_STEP)
    obs = jax.tree.map(lambda x: x[0], rollout.obs)
    greedy = teacher.algo.act(teacher.actor, obs, teacher.algo.carry(fakes.COLUMNS), KEY, False).action
    label = jax.tree.map(lambda x: x[0], rollout.extras[TEACHER])
    assert_close(label.mode(), greedy)
    after, aux = jax.jit(algo.update)(state, rollout, KEY)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((after, aux)))


def test_teachers_that_do_not_fit():
    def refuse(message, teacher, action=BOX, **options):
        with pytest.raises(InputError, match=message):
            distill.make(distill.Config(**options), spec(action), NETWORK, teacher=teacher)

    refuse("algo.loss kl: expected a teacher with the student's kind", acting(sac, spec(BOX)))
    noise = acting(td3, spec(BOX), exploration=OrnsteinUhlenbeck())
    refuse("algo.teacher: .*ornstein_uhlenbeck: the probability of its actions is not known: use a teacher", noise)
    refuse("algo.teacher: expected a policy with the run's action space", acting(ppo, spec(CHOICES)))
    without = spec(BOX)._replace(observation=Box((3,)))
    refuse("algo.teacher: expected a policy with the run's observation", acting(ppo, without, NetworkConfig()))
    refuse("algo.loss mse needs actions of float Boxes", None, CHOICES, loss="mse")
    algo = distill.make(distill.Config(), spec(), NETWORK)
    state = fakes.made_up_state(algo)
    rollout = fakes.rollouts(algo, spec(), algo.actor(state))[0]
    with pytest.raises(InputError, match=r"algo\.teacher: expected a teacher to learn from, got none"):
        algo.update(state, rollout, KEY)


# ---------------------------------------------------------------- runs

SMALL = [
    "--env", "Pendulum-v1", "--set", "env.backend=jax", "--set", "env.randomize={mass: [0.5, 2.0]}",
    "--set", "env.observe_task=true", "--set", "env.num_envs=4", "--set", "rollout.length=16",
    "--set", "network.hidden=[16]", "--set", "run.log=[jsonl]", "--set", "checkpoint.every=128",
]  # fmt: skip
GRU = ["--set", "network.core.name=gru", "--set", "network.core.size=8", "--set", "network.max_seq_len=8"]


@pytest.fixture(scope="module")
def teacher_run(tmp_path_factory):
    """A short run of PPO whose policy reads the mass."""
    out = tmp_path_factory.mktemp("teacher") / "run"
    more = [*GRU, "--set", "algo.normalize_obs=true", "--set", "algo.num_minibatches=2", "--stop", "env_steps=256"]
    assert train.main(["--algo", "ppo", *SMALL, *more, "--out", str(out)]) == 0
    return out


def student(out, teacher, *args):
    more = ["--set", "network.value_inputs=[task]", "--set", "algo.student_acts=[[0, 0], [256, 1]]"]
    more += ["--set", f"algo.teacher={teacher}", "--set", "evaluation.every=256", "--set", "evaluation.duration=2"]
    return train.main(["--algo", "distill", *SMALL, *GRU, *more, "--out", str(out), *args])


def learned(out):
    return jrl.load(out, best=False).weights


@pytest.mark.slow
def test_a_run_resumes_exactly_after_its_teacher_has_moved(teacher_run, tmp_path, capsys):
    teacher = tmp_path / "teacher"
    shutil.copytree(teacher_run, teacher)
    assert student(tmp_path / "whole", teacher, "--stop", "env_steps=512") == 0
    assert student(tmp_path / "half", teacher, "--stop", "env_steps=256") == 0
    teacher.rename(tmp_path / "moved")
    on = ["--resume", str(tmp_path / "half"), "--stop", "env_steps=512"]
    capsys.readouterr()
    assert train.main(on) == 2
    assert "algo.teacher: checkpoint: " in capsys.readouterr().err
    assert train.main([*on, "--set", f"algo.teacher={tmp_path / 'moved'}"]) == 0
    assert_same(learned(tmp_path / "whole"), learned(tmp_path / "half"))


@pytest.mark.slow
def test_a_student_acts_without_its_teacher_and_on_two_devices(teacher_run, tmp_path):
    """Its checkpoint needs no teacher and no mass."""
    teacher = tmp_path / "teacher"
    shutil.copytree(teacher_run, teacher)
    one, two = tmp_path / "one", tmp_path / "two"
    data = ["--set", f"data.output={{path: {tmp_path / 'data'}}}", "--set", "rollout.batch_mode=complete_episodes"]
    assert student(one, teacher, "--stop", "env_steps=256", *data) == 0
    assert student(two, teacher, "--stop", "env_steps=256", "--set", "devices.learners=[0,1]") == 0
    shutil.rmtree(teacher)
    assert evaluate.main([str(one), "--episodes", "2", "--latest"]) == 0
    policy = jrl.load(one)
    obs = {"obs": np.zeros((5, 3), np.float32)}
    assert policy.act(obs).shape == (5, 1)
    assert jax.tree.structure(learned(one)) == jax.tree.structure(learned(two))
