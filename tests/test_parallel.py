"""Our pmap has jax.pmap's meaning; replicated copies survive donation."""

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jrl.config import load
from jrl.errors import InputError
from jrl.learn import parallel
from jrl.learn.parallel import AXIS, PER_DEVICE, REPLICATED, ROLLOUT
from jrl.run import build
from jrl.types import Rollout

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)


def descend(w, x):
    """One step on mean((x w)^2) over all devices; the body of a data-parallel learner."""
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    loss, grad = jax.lax.pmean((loss, grad), AXIS)
    return w - 0.1 * grad, loss


def test_like_jax_pmap(four_devices):
    w = jnp.arange(3.0)
    ours = parallel.pmap(descend, four_devices, (REPLICATED, PER_DEVICE), (REPLICATED, REPLICATED))
    theirs = jax.pmap(descend, axis_name=AXIS)
    got_w, got_loss = jax.block_until_ready(ours(w, X))
    want_w, want_loss = jax.block_until_ready(theirs(jnp.tile(w[None], (4, 1)), X.reshape(4, 2, 3)))
    np.testing.assert_allclose(got_w, want_w[0], rtol=1e-6)
    np.testing.assert_allclose(got_loss, want_loss[0], rtol=1e-6)


def test_a_gradient_is_not_multiplied_by_the_number_of_devices(four_devices):
    """With check_vma=True the gradient of a replicated parameter is summed already: a step four times too long."""
    w = jnp.arange(3.0)
    expected = np.asarray(w) - 0.1 * 2 / 8 * X.T @ (X @ np.asarray(w))
    for mesh in (four_devices, parallel.make_mesh(1)):
        ours = parallel.pmap(descend, mesh, (REPLICATED, PER_DEVICE), (REPLICATED, REPLICATED))
        np.testing.assert_allclose(jax.block_until_ready(ours(w, X))[0], expected, rtol=1e-5)


def test_each_device_knows_its_index(four_devices):
    body = lambda x: x + jax.lax.axis_index(AXIS)
    got = jax.block_until_ready(parallel.pmap(body, four_devices, (PER_DEVICE,), PER_DEVICE)(jnp.zeros(8, jnp.int32)))
    np.testing.assert_array_equal(got, [0, 0, 1, 1, 2, 2, 3, 3])


@pytest.mark.parametrize("devices", [1, 4])
def test_donating_a_replica_keeps_the_original(devices):
    mesh = parallel.make_mesh(devices)
    tree = {"w": jnp.arange(3.0), "n": np.float32(2.0)}
    replica = parallel.replicate(tree, mesh)
    add = parallel.pmap(
        lambda t: jax.tree.map(lambda x: x + 1, t), mesh, (REPLICATED,), REPLICATED, donate_argnums=(0,)
    )
    after = jax.block_until_ready(add(replica))
    assert replica["w"].is_deleted()  # it was donated
    np.testing.assert_array_equal(tree["w"], [0, 1, 2])  # and the original was not
    np.testing.assert_array_equal(after["w"], [1, 2, 3])
    assert len(after["w"].addressable_shards) == devices
    one = parallel.first_copy(after)
    assert one["w"].devices() == {jax.devices()[0]}
    np.testing.assert_array_equal(one["w"], [1, 2, 3])
    assert float(one["n"]) == 3.0


def test_a_rollout_is_split_by_columns(four_devices):
    T, B = 3, 8
    column = jnp.tile(jnp.arange(B)[None], (T, 1))
    rollout = Rollout(
        obs=jnp.tile(column[..., None], (1, 1, 2)),
        last_obs=jnp.tile(jnp.arange(B)[:, None], (1, 2)),
        action=column,
        reward=column,
        terminated=column,
        truncated=column,
        mask=column,
        contiguous=jnp.arange(B),
        extras={"log_prob": column, "dist": {"logits": jnp.tile(column[..., None], (1, 1, 5))}},
        carry=(jnp.arange(B),),
    )
    placed = parallel.shard(rollout, four_devices, ROLLOUT)

    def body(rollout):
        mine = jax.lax.axis_index(AXIS) * 2 + jnp.arange(2)
        spread = lambda x, axis: jnp.expand_dims(mine, [i for i in range(x.ndim) if i != axis])
        bare = rollout.replace(last_obs=(), contiguous=(), carry=())
        by_time = [jnp.all(x == spread(x, 1)) & (x.shape[:2] == (T, 2)) for x in jax.tree.leaves(bare)]
        rest = jax.tree.leaves((rollout.last_obs, rollout.contiguous, rollout.carry))
        return jnp.stack(by_time + [jnp.all(x == spread(x, 0)) for x in rest])[None]

    right = np.asarray(parallel.pmap(body, four_devices, (ROLLOUT,), PER_DEVICE)(placed))
    assert right.shape == (4, len(jax.tree.leaves(rollout)))
    assert right.all()


def test_make_mesh():
    mesh = parallel.make_mesh(2)
    assert isinstance(mesh, Mesh)
    assert mesh.shape == {AXIS: 2}
    assert parallel.make_mesh(0).devices.size == len(jax.devices())
    with pytest.raises(InputError, match=r"99 devices asked for, but there are \d+ \(cpu\)"):
        parallel.make_mesh(99)


def test_diverged_names_what_is_not_the_same_everywhere(four_devices):
    tree = {"w": jnp.arange(3.0), "stats": {"mean": jnp.full(2, jnp.nan)}}
    replica = parallel.replicate(tree, four_devices)
    assert parallel.find_diverged(replica) == []
    drift = lambda t: {**t, "w": t["w"] + jax.lax.axis_index(AXIS)}
    drifted = jax.block_until_ready(parallel.pmap(drift, four_devices, (REPLICATED,), REPLICATED)(replica))
    assert parallel.find_diverged(drifted) == ["w"]


# ---------------------------------------------------------------- who does what


def test_devices_are_chosen_by_index():
    found = parallel.devices(learners=(1, 3), actors=(0,))
    assert list(found.learners.devices.flat) == [jax.devices()[1], jax.devices()[3]]
    assert found.actors == (jax.devices()[0],)
    assert parallel.devices(learners=(2,)).actors == (jax.devices()[2],)


def test_forced_host_devices_are_used_when_asked_for():
    assert parallel.devices().learners.devices.size == 1
    assert parallel.devices(fake=4).learners.devices.size == 4
    assert parallel.devices(fake=2).learners.devices.size == 2
    assert parallel.devices(fake=4, learners=(0, 1), actors=(2, 3)).actors == tuple(jax.devices()[2:4])


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"learners": (0, 9)},
            r"devices.learners: expected indices of devices, got \[0, 9\], but there are \d+ \(cpu\): use .*fake=10",
        ),
        ({"actors": (7,)}, r"devices.actors: expected indices of devices, got \[7\]"),
        ({"fake": 64}, r"devices.fake: jax was used before with \d+ x cpu: start a new process for devices.fake=64"),
    ],
)
def test_devices_that_are_not_there(asked, message):
    with pytest.raises(InputError, match=message):
        parallel.devices(**asked)


def rollout_of(columns):
    """A rollout in which every number tells of its column; numpy."""
    T = 3
    column = np.tile(np.asarray(columns, np.float32)[None], (T, 1))
    pair = lambda x: np.stack([x, x], -1)
    return Rollout(
        obs=pair(column), last_obs=pair(column[0]), action=column, reward=column, terminated=column, truncated=column,
        mask=column, contiguous=column[0], extras={"log_prob": column, "dist": {"logits": pair(column)}}, carry=(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("parts", "learners", "on_devices"),
    [
        pytest.param(*how, marks=[] if how in ((3, 2, True), (1, 3, True)) or not how[2] else [pytest.mark.slow])
        for how in itertools.product((1, 2, 3, 4, 6), (1, 2, 3, 4), (False, True))
    ],
)
def test_deal(parts, learners, on_devices):
    mesh, size = parallel.make_mesh(learners), 12 // parts
    made = [rollout_of(range(i * size, (i + 1) * size)) for i in range(parts)]
    if on_devices:
        made = [jax.device_put(r, jax.devices()[i % 4]) for i, r in enumerate(made)]
    dealt, expected = parallel.deal(made, mesh), rollout_of(range(12))
    jax.tree.map(np.testing.assert_array_equal, dealt, expected)
    for spec, leaf in (
        (P(None, AXIS), dealt.obs),
        (P(AXIS), dealt.last_obs),
        (P(None, AXIS), dealt.extras["log_prob"]),
    ):
        assert leaf.sharding.is_equivalent_to(jax.sharding.NamedSharding(mesh, spec), leaf.ndim)


def test_stack_leaves_everything_where_it_is():
    trees = [jax.device_put({"n": jnp.int32(i), "x": jnp.full(2, i)}, d) for i, d in enumerate(jax.devices()[:3])]
    stacked = parallel.stack(trees)
    np.testing.assert_array_equal(stacked["n"], [0, 1, 2])
    np.testing.assert_array_equal(stacked["x"], [[0, 0], [1, 1], [2, 2]])
    assert stacked["x"].sharding.device_set == set(jax.devices()[:3])
    np.testing.assert_array_equal(parallel.stack(jax.device_get(trees))["n"], [0, 1, 2])


def _gpus(count):
    """What is read of a mesh of so many NVIDIA GPUs."""
    gpu = SimpleNamespace(client=SimpleNamespace(platform_version="PJRT C API\ncuda 13000"))
    return SimpleNamespace(devices=np.array([gpu] * count))


def test_on_an_nvidia_gpu_programs_have_options_of_xla(monkeypatch):
    """Loops are graphs on one; calls of EnvPool are not fused; elsewhere, and where XLA_FLAGS says it, none is set."""
    graphs = parallel._compiler_options(_gpus(1), loops=True, pure=True)
    assert {"WHILE", "CONDITIONAL"} < set(graphs.pop("xla_gpu_enable_command_buffer").split(",")) and not graphs
    calls = {"xla_gpu_enable_dynamic_slice_fusion": False}
    assert parallel._compiler_options(_gpus(1), loops=False, pure=False) == calls
    assert parallel._compiler_options(_gpus(2), loops=True, pure=False) == calls
    assert parallel._compiler_options(_gpus(1), loops=False, pure=True) is None
    assert parallel._compiler_options(parallel.make_mesh(1), loops=True, pure=False) is None
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=FUSION")
    assert parallel._compiler_options(_gpus(1), loops=True, pure=True) is None


def test_options_that_this_xla_does_not_have_are_left_out(monkeypatch):
    monkeypatch.setattr(parallel, "_GRAPHS", {"xla_gpu_no_such_flag": "WHILE"})
    assert parallel._compiler_options(_gpus(1), loops=True, pure=True) is None


@pytest.mark.parametrize(("config", "loops"), [("dqn", True), ("r2d2", True), ("ppo", False)])
def test_programs_that_learn_from_replay_loop(config, loops, monkeypatch):
    program = build.run(load(f"configs/{config}.yaml", ["env.backend=jax"])).program
    asked = []

    def pmap(*args, loops, **more):
        asked.append(loops)
        raise InterruptedError  # nothing is to be compiled

    monkeypatch.setattr(parallel, "pmap", pmap)
    with pytest.raises(InterruptedError):
        program.init(0)
    assert asked == [loops]
