"""The loop: fused and staged learn the same, counters are exact, devices agree, what is due comes when it should."""

import copy
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import monitoring

from jrl import config
from jrl.algos import a2c, dqn
from jrl.envs import classic, jax_env
from jrl.learn import learner, parallel
from jrl.learn.fused import Fused
from jrl.learn.program import Role, role_key, train
from jrl.learn.staged import Staged
from jrl.metrics import episodes
from jrl.metrics.timers import Timers
from jrl.networks import NetworkConfig
from jrl.replay import prioritized, ring
from jrl.rollout import unroll
from jrl.rollout.sources import JaxSource
from jrl.run.session import Session
from jrl.types import Episodes, element

T, B, SEED = 16, 8, 5
CONFIG = a2c.Config(lr=1e-2, normalize_obs=True)
EVERYTHING = 10**9


def parts(num_envs):
    env = jax_env.build(classic.cartpole(), num_envs)
    algo = a2c.make(CONFIG, env.spec, NetworkConfig(hidden=(8,)), axis_name=parallel.AXIS)
    return env, algo


def fused(iterations=1, devices=1):
    env, algo = parts(B // devices)
    mesh = parallel.make_mesh(devices)
    return Fused(learner.on_policy(algo), unroll.make(env, algo.act, length=T), mesh, iterations=iterations, rows=T * B)


def staged(devices=1, source=JaxSource):
    env, algo = parts(B)
    make = lambda key: source(env, algo.act, key=key, length=T)
    return Staged(learner.on_policy(algo), make, parallel.make_mesh(devices), rows=T * B, timers=Timers())


@pytest.fixture(scope="module")
def programs():
    """Compiled once: name -> Program."""
    return {"K1": fused(1), "K4": fused(4), "staged": staged()}


def play(program, iterations, seed=SEED, **counters):
    """(learner state on the host, the infos without states) after so many iterations, each call waited for."""
    infos, state = [], None
    for info in train(program, program.init(seed), seed=seed, total_env_steps=EVERYTHING, **counters):
        state = jax.block_until_ready(info.state)
        infos.append(info._replace(state=None))
        if info.iteration >= iterations:
            break
    return jax.device_get(state.learner), infos


def assert_trees(a, b, **tolerance):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b)):
        np.testing.assert_allclose(x, y, **{"rtol": 0, "atol": 0, **tolerance}, err_msg=jax.tree_util.keystr(path))


def total(infos):
    """Steps and episodes of all calls."""
    return sum(episodes.count_steps(i.episodes) for i in infos), sum(int(np.sum(i.episodes.count)) for i in infos)


@pytest.fixture(scope="module")
def eight(programs):
    """What 8 iterations give: name -> (learner, infos)."""
    return {name: play(program, 8) for name, program in programs.items()}


def test_one_or_four_iterations_a_call_are_the_same(eight):
    (one, infos), (four, infos_four) = eight["K1"], eight["K4"]
    assert_trees(one, four)
    assert (len(infos), len(infos_four)) == (8, 2)
    assert total(infos) == total(infos_four)
    last, last_four = infos[-1].episodes, infos_four[-1].episodes
    np.testing.assert_array_equal(last.window_return, last_four.window_return)
    returns = [i.episodes for i in infos[4:]]
    np.testing.assert_allclose(last_four.return_sum, sum(np.asarray(r.return_sum) for r in returns), rtol=1e-6)
    np.testing.assert_allclose(last_four.return_min, min(np.asarray(r.return_min) for r in returns))
    np.testing.assert_allclose(last_four.return_max, max(np.asarray(r.return_max) for r in returns))
    for name, value in infos_four[-1].metrics.items():
        np.testing.assert_allclose(
            value, np.mean([i.metrics[name] for i in infos[4:]]), rtol=1e-4, atol=1e-6, err_msg=name
        )


def test_fused_and_staged_learn_the_same(eight):
    (one, infos), (other, infos_staged) = eight["K1"], eight["staged"]
    assert_trees(one, other)  # to the bit
    assert total(infos) == total(infos_staged)
    start = jax.device_get(fused().init(SEED).learner)
    assert max(float(np.abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (start.params, one.params)))) > 1e-2


def test_two_runs_are_bit_identical_and_seeds_differ(programs, eight):
    again, infos = play(programs["K4"], 8)
    assert_trees(eight["K4"][0], again)
    assert_trees([i.metrics for i in eight["K4"][1]], [i.metrics for i in infos])
    other, _ = play(programs["K4"], 8, seed=SEED + 1)
    leaves = zip(jax.tree.leaves(other.params), jax.tree.leaves(again.params))
    assert any(not np.array_equal(a, b) for a, b in leaves)


def test_a_run_in_two_parts_is_the_run(programs, eight):
    """State and counters are all that a continuation needs."""
    program = programs["K4"]
    state = None
    for info in train(program, program.init(SEED), seed=SEED, total_env_steps=EVERYTHING):
        state = jax.device_get(info.state)
        counters = {"iteration": info.iteration, "clock": info.clock_after()}
        break
    for info in train(program, program.place(state), seed=SEED, total_env_steps=EVERYTHING, **counters):
        assert info.iteration == 8
        assert info.env_steps == counters["clock"].env_steps
        assert_trees(eight["K4"][0], jax.device_get(info.state.learner))
        break


def test_counters_are_exact(eight):
    for name, (state, infos) in eight.items():
        steps = [episodes.count_steps(i.episodes) for i in infos]
        # CartPole under a new policy ends after about 20 steps, and the row after an end is none
        rows = T * B * 8
        assert sum(steps) < rows, name
        assert rows - sum(steps) <= total(infos)[1], name
        assert [i.env_steps for i in infos] == [0, *itertools.accumulate(steps)][:-1], name
        assert [i.env_steps_after() for i in infos] == list(itertools.accumulate(steps)), name
        assert int(state.env_steps) == sum(steps), name  # the algorithm counts as the loop does
        assert infos[-1].iteration == 8


@pytest.mark.parametrize("name", ["K1", "K4"])
def test_the_budget_is_kept(programs, eight, name):
    """The iteration that reaches the budget is the last, however many iterations a call has."""
    program = programs[name]
    after = [i.env_steps_after() for i in eight["K1"][1]]  # of each iteration
    for budget in (1, after[0], after[0] + 1, after[4], after[4] + 1):
        infos = list(train(program, program.init(SEED), seed=SEED, total_env_steps=budget))
        jax.block_until_ready(infos[-1].state)
        needed = next(n for n, steps in enumerate(after, 1) if steps >= budget)
        assert (infos[-1].iteration, infos[-1].env_steps_after()) == (needed, after[needed - 1]), budget
        steps = [i.env_steps_after() - i.env_steps for i in infos]
        assert [i.env_steps for i in infos] == [0, *itertools.accumulate(steps)][:-1]


def test_a_call_of_fewer_iterations_is_the_beginning_of_a_whole_one(programs):
    """State, metrics and episodes of 3 of 4 iterations are those of 3 calls of one."""
    ones, four = programs["K1"], programs["K4"]
    state, each = ones.init(SEED), []
    for i in range(3):
        state, metrics, report = ones.advance(state, SEED, i)
        each.append((jax.device_get(metrics), jax.device_get(report)))
    other, metrics, report = jax.device_get(four.advance(four.init(SEED), SEED, 0, 3))
    assert_trees(jax.device_get(state.learner), other.learner)
    for name, value in metrics.items():
        values = np.asarray([m[name] for m, _ in each])
        wanted = np.nanmean(values) if values.dtype.kind == "f" else values[-1]
        np.testing.assert_allclose(value, wanted, rtol=1e-5, err_msg=name)
    assert_trees(report, jax.device_get(episodes.add_reports([r for _, r in each])))


def test_the_state_is_donated(programs):
    for name, program in programs.items():
        first, buffer = program.init(SEED), None
        for info in train(program, first, seed=SEED, total_env_steps=EVERYTHING):
            jax.block_until_ready(info.state)
            leaf = jax.tree.leaves(info.state.learner.params)[0]
            if buffer is not None:
                assert buffer.is_deleted(), name
                break
            buffer = leaf
        assert all(x.is_deleted() for x in jax.tree.leaves(first.learner)), name


def test_four_devices(four_devices):
    """Fused: each device has environments of its own and the same learner. Two calls, waited for."""
    program = fused(iterations=2, devices=4)
    state, infos = program.init(SEED), []
    for info in train(program, state, seed=SEED, total_env_steps=EVERYTHING):
        jax.block_until_ready((info.state, info.metrics, info.episodes))
        infos.append(info._replace(state=None))
        if len(infos) == 2:
            break
    for leaf in jax.tree.leaves(info.state.learner):
        replicas = [np.asarray(s.data) for s in leaf.addressable_shards]
        assert len(replicas) == 4
        assert all(np.array_equal(replicas[0], r) for r in replicas[1:])
    obs = np.asarray(info.state.source.obs)
    assert obs.shape == (4, B // 4, 4)
    assert len(np.unique(obs[..., 0])) == B  # no two environments are the same
    assert np.asarray(info.episodes.steps).shape == (4,)
    assert int(parallel.first_copy(info.state.learner.env_steps)) == sum(
        episodes.count_steps(i.episodes) for i in infos
    )
    assert infos[1].env_steps == episodes.count_steps(infos[0].episodes)
    placed = program.place(jax.device_get(info.state))
    assert_trees(jax.device_get(placed), jax.device_get(info.state))
    row = episodes.summarize([i.episodes for i in infos])
    assert row["episode/count"] == sum(int(np.sum(i.episodes.count)) for i in infos)


def test_every_device_and_iteration_has_a_key_of_its_own(four_devices):
    """A learner and environments that do nothing but write down the keys that they are given."""
    none, calls = np.zeros((), np.int32), 4
    report = Episodes(none, none, none, none, none, none, none[None], none[None])

    def note(state, key):
        return {"keys": state["keys"].at[state["at"]].set(jax.random.key_data(key)), "at": state["at"] + 1}

    def start(key, *vector):
        return note({"keys": jnp.zeros((calls + 1, 2), jnp.uint32), "at": jnp.zeros((), jnp.int32)}, key)

    nothing = lambda *args: ()
    learn = learner.Learner(start, nothing, nothing, lambda state, replay, rollout, key: (note(state, key), (), {}))
    collect = unroll.Unroll(
        start, lambda state, actor, key, *vector: (note(state, key), (), jax.tree.map(jnp.asarray, report))
    )
    program = Fused(learn, collect, four_devices, iterations=2, rows=1)
    state = program.init(SEED)
    for call in range(calls // 2):
        state, _, _ = jax.block_until_ready(program.advance(state, SEED, 2 * call))
    update = [np.asarray(s.data) for s in state.learner["keys"].addressable_shards]
    assert all(np.array_equal(update[0], keys) for keys in update)  # minibatches are drawn for all devices together
    collect_keys = np.asarray(state.source["keys"]).reshape(-1, 2)
    assert collect_keys.shape == (4 * (1 + calls), 2)
    every = [tuple(key) for key in (*update[0], *collect_keys)]
    assert len(set(every)) == len(every)
    # they follow from seed, role and iteration alone
    for i in range(calls):
        key = role_key(SEED, Role.UPDATE, i)
        np.testing.assert_array_equal(update[0][1 + i], jax.random.key_data(key))


def test_environments_outside_the_program_are_not_stepped_once_per_device(four_devices):
    env, algo = parts(B)
    collect = unroll.make(env._replace(pure=False), algo.act, length=T)
    with pytest.raises(ValueError, match="use Staged"):
        Fused(learner.on_policy(algo), collect, four_devices, iterations=1, rows=T * B)


# ---------------------------------------------------------------- a user's own iteration


def told(program, fn):
    """The same program, whose iterations are `fn`'s."""
    other = copy.copy(program)
    other.training_step = fn
    return other


def test_the_ordinary_iteration_by_hand_is_bit_identical(programs, eight):
    seen = []

    def ordinary(step):
        metrics = step.learn(step.sample())
        seen.append((step.seed, step.iteration, sorted(metrics)))

    state, infos = play(told(programs["staged"], ordinary), 8)
    expected, expected_infos = eight["staged"]
    assert_trees(state, expected)
    assert total(infos) == total(expected_infos)
    assert_trees([i.metrics for i in infos], [i.metrics for i in expected_infos])
    assert_trees([i.episodes for i in infos], [i.episodes for i in expected_infos])
    assert seen == [(SEED, i, sorted(infos[0].metrics)) for i in range(8)]


def test_an_iteration_of_several_samples_and_steps(programs):
    """Reports are summed, metrics averaged; each call draws anew."""
    rollouts, losses = [], []

    def twice(step):
        assert step.metrics == {}
        for _ in range(2):
            rollouts.append(jax.device_get(step.sample()))
        for rollout in rollouts[-2:]:
            losses.append(float(step.learn(rollout)["loss/value"]))
        step.metrics["mine/rows"] = float(rollouts[-1].mask.size)

    state, infos = play(told(programs["staged"], twice), 2)
    assert [int(r.contiguous.all()) for r in rollouts] == [0, 1, 1, 1]
    masks = [int(r.mask.sum()) for r in rollouts]
    assert [episodes.count_steps(i.episodes) for i in infos] == [sum(masks[:2]), sum(masks[2:])]
    assert int(state.env_steps) == sum(masks) == infos[-1].env_steps_after()
    ended = [int(((r.terminated | r.truncated) & r.mask).sum()) for r in rollouts]
    assert [int(i.episodes.count) for i in infos] == [sum(ended[:2]), sum(ended[2:])]
    found = [float(i.metrics["loss/value"]) for i in infos]
    np.testing.assert_allclose(found, [np.mean(losses[:2]), np.mean(losses[2:])], rtol=1e-6)
    assert infos[0].metrics["mine/rows"] == T * B
    # the same parameters acted in both samples of the first iteration, with other random numbers
    same = [np.mean(a == b) for a, b in zip(rollouts[0].action.T, rollouts[1].action.T)]
    assert 0.2 < np.mean(same) < 0.8


def test_an_iteration_without_a_sample_or_without_learning(programs):
    kept = []

    def alternate(step):
        if step.iteration % 3 == 0:
            kept[:] = [step.sample()]
        elif step.iteration % 3 == 1:
            step.learn(kept[0])
            step.learn(kept[0])

    program = told(programs["staged"], alternate)
    state, infos = play(program, 3)
    steps = [episodes.count_steps(i.episodes) for i in infos]
    assert steps[0] > 0
    assert steps[1:] == [0, 0]
    assert int(state.env_steps) == 2 * steps[0]  # it was learned from twice
    assert [i.env_steps_after() for i in infos] == [steps[0]] * 3
    assert [sorted(i.metrics) == [] for i in infos] == [True, False, True]
    row = episodes.summarize([infos[0].episodes, infos[1].episodes])
    assert row == episodes.summarize([infos[0].episodes])  # the windows are still there


# ---------------------------------------------------------------- replay, and who looks


class Spy:
    """A jitted function of one kind of arguments, that keeps how it was compiled."""

    def __init__(self, fn):
        self.fn, self.compiled = fn, None

    def lower(self, *args):
        self.lowered = self.fn.lower(*args)
        return self

    def compile(self):
        self.compiled = self.lowered.compile()
        return self.compiled

    def __call__(self, *args):
        return (self.compiled or self.lower(*args).compile())(*args)


@pytest.mark.parametrize(
    ("how", "room"),
    [
        ("staged", ring),
        pytest.param("fused", prioritized, marks=pytest.mark.slow),
        *(pytest.param(*other, marks=pytest.mark.slow) for other in (("fused", ring), ("staged", prioritized))),
    ],
)
def test_the_replay_is_never_copied(how, room, monkeypatch):
    """Neither within the program nor at its border."""
    spies = []
    pmap = parallel.pmap
    monkeypatch.setattr(parallel, "pmap", lambda *args, **kw: spies.append(Spy(pmap(*args, **kw))) or spies[-1])
    env = jax_env.build(classic.cartpole(), 4)
    algo = dqn.make(dqn.Config(), env.spec, NetworkConfig(hidden=(8,)), axis_name=parallel.AXIS)
    options = {"alpha": 0.6, "beta": 0.4} if room is prioritized else {}
    buffer = room.make(
        element(env.spec.observation),
        element(env.spec.action),
        capacity=400_000,
        num_envs=4,
        batch_size=8,
        gamma=0.9,
        **options,
    )
    learn = learner.off_policy(algo, buffer, updates=2, learning_starts=4, axis_name=parallel.AXIS)
    if how == "fused":
        program = Fused(learn, unroll.make(env, algo.act, length=1), parallel.make_mesh(1), iterations=2, rows=4)
    else:
        source = lambda key: JaxSource(env, algo.act, key=key, length=1)
        program = Staged(learn, source, parallel.make_mesh(1), rows=4, timers=Timers())
    state = program.init(0)
    size = sum(x.nbytes for x in jax.tree.leaves(state.replay))
    pointers = lambda: [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state.replay) if x.size > 1]
    before = pointers()
    for i in range(3):
        state, metrics, _ = program.advance(state, 0, 2 * i)
    assert int(metrics["train/updates"]) > 0
    assert pointers() == before
    memory = spies[0].compiled.memory_analysis()
    assert size > 10e6 and memory.temp_size_in_bytes < size / 20
    program.close()


def test_the_learning_program_is_lowered_once():
    names = []

    def listen(event, seconds, **about):
        if event.endswith("jaxpr_to_mlir_module_duration"):
            names.append(about["fun_name"])

    pytest.importorskip("envpool")
    small = ["env.backend=envpool", "env.num_envs=2", "rollout.length=8", "algo.num_epochs=1", "network.hidden=[8]"]
    monitoring.register_event_duration_secs_listener(listen)
    try:
        with Session(config.load("ppo", small)) as session:
            session.start()
            session.advance()
            session.advance()
    finally:
        monitoring.unregister_event_duration_listener(listen)
    assert names.count("jit(step)") == 1
    assert names.count("jit(body)") == 1  # in a thread, ahead of the first call
