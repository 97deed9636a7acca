"""What holds for every registered algorithm: pure, arrays only, the same anywhere, blind to masked rows."""

import dataclasses
import functools
import math
import typing

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES
from fakes import assert_close, assert_same, differ
from jax.sharding import PartitionSpec as P

from jrl import algos, config
from jrl.fields.data import Fresh, learns_from
from jrl.learn import parallel
from jrl.ops import minibatch
from jrl.run.store import checkpoint
from jrl.run.store.writer import Checkpointer
from jrl.types import Box, Rollout, UpdateAux

NAMES = algos.names()
KEY = jax.random.key(11)
NETWORK = dataclasses.replace(fakes.NETWORK, hidden=(8,))


def traced(cfg):
    return jax.tree.map(np.float32, cfg)


def stack(trees):
    return jax.tree.map(lambda *x: np.stack(x), *jax.device_get(list(trees)))


class Made:
    """One algorithm with its options, its jitted functions and what it learns from."""

    def __init__(self, name, **overrides):
        self.name, self.overrides = name, overrides
        self.spec = fakes.spec(name=name)
        self.algo = fakes.make(name, self.spec, NETWORK, **overrides)
        self.cfg = fakes.config(name, **overrides)
        self.init, self.updated = jax.jit(self.algo.init), jax.jit(self.of)
        self.act = jax.jit(self.algo.act, static_argnames="explore")
        self.state = fakes.perturbed(fakes.init_state(self.algo))
        self.actor = self.algo.actor(self.state)
        self.data = self.batches(1)[0]
        self.obs = self.data.obs[0] if self.algo.on_policy else self.data.obs  # [B, *]
        self.carry = self.algo.carry(jax.tree.leaves(self.obs)[0].shape[0])

    def of(self, cfg, state, data, key):
        """What comes of new data, with the floats of `cfg`."""
        return fakes.learn(algos.get(self.name).make(cfg, self.spec, NETWORK))(state, data, key)

    def update(self, state, data, key):
        """The algorithm's own, with floats that are traced: one program for all of their values."""
        return self.updated(traced(self.cfg), state, data, key)

    @functools.cached_property
    def together(self):
        """`of`, of lanes that differ in everything."""
        return jax.jit(jax.vmap(self.of))

    def batches(self, count):
        return [fakes.data(self.algo, self.spec, self.actor, seed=seed) for seed in range(count)]


# of floats that are null by default and in LOADED, so that there is something to trace
FLOATS = {"max_leaf_norm": 0.7, "max_grad_value": 0.02, "max_grad_norm": 0.5, "actor_lr": 1e-3, "ent_coef_lr": 2e-3}
FLOATS |= {"target_entropy": 0.5, "target_kl": 0.5, "kl_target": 0.01, "kl_coef": 0.2, "value_clip_eps": 0.2}
FLOATS |= {"bc_alpha": 2.5, "value_lr": 1e-3, "top_fraction": 0.5}


@functools.cache
def made(name, loaded):
    if not loaded:
        return Made(name)
    cfg = fakes.config(name, **CASES[name].loaded)
    return Made(name, **{n: x for n, x in FLOATS.items() if getattr(cfg, n, 0) is None}, **CASES[name].loaded)


slow = lambda name, rare: pytest.param(name, marks=[pytest.mark.slow] if rare else [])
OTHERS = tuple(name for name in NAMES if CASES[name].like)
each = pytest.mark.parametrize("name", [slow(n, n in OTHERS) for n in NAMES])
# with every option on; with the defaults one of each kind, the others in the slow set
each_variant = pytest.mark.parametrize(
    ("name", "loaded"),
    [
        pytest.param(n, loaded, marks=[] if (loaded and n not in OTHERS) or n in ("ppo", "dqn") else [pytest.mark.slow])
        for n in NAMES
        for loaded in (False, True)
    ],
    ids=[f"{n}-{option}" for n in NAMES for option in ("default", "loaded")],
)


@each_variant
def test_state_and_actor_hold_arrays_only(name, loaded):
    m = made(name, loaded)
    found = []

    def began():  # not computed: what is told of each leaf here is what would hold of it
        state = m.algo.init(KEY)
        for tree in (state, m.algo.actor(state)):
            leaves = jax.tree.leaves(tree)
            assert leaves
            for leaf in leaves:
                assert isinstance(leaf, jax.Array)
                assert not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)  # acting gets its keys from outside
        found.extend(id(x) for x in jax.tree.leaves(state))
        return state

    shapes = jax.eval_shape(began)
    assert len(set(found)) == len(found)  # each can be donated
    state = m.init(KEY)
    after, _ = m.update(state, m.data, KEY)
    assert jax.tree.structure(state) == jax.tree.structure(after)  # it can be a scan's carry
    signature = lambda tree: [(x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(tree)]
    assert signature(state) == signature(after) == signature(shapes)


@each_variant
def test_the_same_key_gives_the_same(name, loaded):
    m = made(name, loaded)
    assert_same(m.init(KEY), m.init(KEY))
    first, again = (m.update(m.state, m.data, KEY) for _ in range(2))
    assert_same(first, again)
    assert_same(m.act(m.actor, m.obs, m.carry, KEY), m.act(m.actor, m.obs, m.carry, KEY))


@each
def test_another_key_gives_another(name):
    m = made(name, True)  # DQN's gradient step reads its key for noisy layers only
    other = jax.random.key(12)
    assert differ(m.init(KEY), m.init(other))
    if name not in ("a2c", "vdn", "iql", "bc", "marwil", "dt"):  # whose one step on all that there is draws nothing
        assert differ(m.update(m.state, m.data, KEY)[0], m.update(m.state, m.data, other)[0])
    assert differ(m.act(m.actor, m.obs, m.carry, KEY), m.act(m.actor, m.obs, m.carry, other))
    assert differ(m.state.params, m.update(m.state, m.data, KEY)[0].params)  # and it learns at all


@each_variant
def test_metrics_are_finite_scalars(name, loaded):
    m = made(name, loaded)
    _, aux = m.update(m.state, m.data, KEY)
    assert aux.metrics
    for key, value in aux.metrics.items():
        assert value.shape == (), key
        assert np.isfinite(value), key


@each
def test_vmap_over_seeds(name):
    m = made(name, True)
    keys = jax.random.split(KEY, 3)
    states = jax.device_get(jax.jit(jax.vmap(m.algo.init))(keys))
    batches = m.batches(3)
    lanes = [i % 3 for i in range(len(each_float(m.cfg)))]
    cfgs = stack([traced(m.cfg)] * len(lanes))
    rows = jax.tree.map(lambda x: x[np.array(lanes)], (states, stack(batches), keys))
    together, _ = m.together(cfgs, *rows)
    for i in range(3):
        alone, _ = m.update(m.init(keys[i]), batches[i], keys[i])
        assert_close(fakes.part(together, i), alone)


def equations(jaxpr):
    """All equations of a jaxpr, those of the jaxprs in it too."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


@each
def test_vmapped_initialisation_has_no_batched_decomposition(name):
    """LAPACK's QR of a batch hangs now and then on two cores; a hang that happens seldom is found by reading."""
    init = jax.vmap(fakes.make(name, network=dataclasses.replace(fakes.NETWORK, init="orthogonal")).init)
    found = list(equations(jax.make_jaxpr(init)(jax.random.split(KEY, 3)).jaxpr))
    decompositions = [e for e in found if any(word in e.primitive.name for word in ("geqrf", "householder", "qr"))]
    assert decompositions, sorted({e.primitive.name for e in found})
    for equation in decompositions:
        assert equation.invars[0].aval.ndim == 2, equation


# values at which an algorithm might take another path in Python
EDGES = {"tau": 1.0, "target_noise": 0.0, "kl_coef": 0.0, "ent_coef": 0.0, "gamma": 0.0, "gae_lambda": 0.0, "beta": 0.0}


def each_float(cfg):
    """`cfg`, and one like it for each of its floats where that is another number."""
    leaves, tree = jax.tree.flatten(cfg)
    changed = [tree.unflatten([*leaves[:i], x * 0.9, *leaves[i + 1 :]]) for i, x in enumerate(leaves)]
    return [cfg, *changed]


@each
def test_vmap_over_any_float_is_a_loop_over_it(name):
    """No Python branch reads a float of the Config: traced or not, one by one or in a batch, they mean the same."""
    m = made(name, True)
    cfgs = each_float(fakes.config(name, **m.overrides))
    hints = typing.get_type_hints(type(cfgs[0]))
    assert not [n for n, hint in hints.items() if getattr(cfgs[0], n) is None and "float" in str(hint)]
    edges = {n: x for n, x in EDGES.items() if isinstance(getattr(cfgs[0], n, None), float)}
    cfgs.append(dataclasses.replace(cfgs[0], **edges, **({"kl_target": None} if "kl_coef" in edges else {})))

    state, edge = m.state, functools.partial(m.of, cfgs[-1])  # with floats that are constants
    assert_close(m.updated(traced(cfgs[-1]), state, m.data, KEY)[0], jax.jit(edge)(state, m.data, KEY)[0])
    loop = [m.updated(traced(cfg), state, m.data, KEY)[0] for cfg in cfgs[:-1]]
    same = [stack([x] * len(loop)) for x in (state, m.data)]
    together, _ = m.together(stack(map(traced, cfgs[:-1])), *same, jnp.stack([KEY] * len(loop)))
    for i in range(len(loop)):
        assert_close(fakes.part(together, i), loop[i])
    assert any(differ(loop[0].params, after.params) for after in loop)


UPDATES = 8


def specs(data, before=()):
    """How what is learned from lies on devices, by columns or by rows of a Batch, with more axes before."""
    spec = parallel.ROLLOUT if isinstance(data, Rollout) else parallel.PER_DEVICE
    return jax.tree.map(lambda s: P(*before, *s), spec, is_leaf=lambda x: isinstance(x, P))


def updates(learn):
    """(state, data [K, ...], keys [K]) -> (state, aux of the last): K updates as one program."""

    def run(state, data, keys):
        state, aux = jax.lax.scan(lambda state, x: learn(state, *x), state, (data, keys))
        return state, jax.tree.map(lambda x: x[-1], aux)

    return run


@pytest.mark.parametrize(
    ("name", "loaded"),
    [
        pytest.param(n, loaded, marks=[] if loaded and n in ("ppo", "dqn") else [pytest.mark.slow])
        for n in NAMES
        for loaded in (False, True)
    ],
)
def test_any_number_of_devices_learns_the_same(name, loaded):
    """The same global batches on one device and on several, and by a researcher's own jax.pmap."""
    m = made(name, loaded)
    run = updates(fakes.learn(fakes.make(name, m.spec, NETWORK, axis_name=parallel.AXIS, **m.overrides)))
    batches = m.batches(4)
    data = jax.tree.map(lambda *x: np.stack(UPDATES // 4 * x), *batches)
    keys = jax.random.split(KEY, UPDATES)
    priority = parallel.REPLICATED if m.algo.on_policy else parallel.PER_DEVICE
    one, found = m.state, {}
    for i in range(UPDATES):
        one, aux = m.update(one, batches[i % 4], keys[i])
    for devices in ((2, 4) if name == "ppo" else (4,)) if loaded else (1, 4):
        mesh = parallel.make_mesh(devices)
        mapped = parallel.pmap(
            run,
            mesh,
            (parallel.REPLICATED, specs(batches[0], (None,)), parallel.REPLICATED),
            (parallel.REPLICATED, UpdateAux(parallel.REPLICATED, priority)),
        )
        placed = parallel.shard(data, mesh, specs(batches[0], (None,)))
        found[devices] = jax.block_until_ready(mapped(parallel.replicate(m.state, mesh), placed, keys))
        for path, x in jax.tree_util.tree_leaves_with_path(found[devices][0]):
            replicas = [np.asarray(shard.data) for shard in x.addressable_shards]
            assert len(replicas) == devices
            for replica in replicas[1:]:
                np.testing.assert_array_equal(replicas[0], replica, err_msg=jax.tree_util.keystr(path))
    pairs = zip(*map(jax.tree.leaves, jax.device_get((one.params, m.state.params))))
    moved = max(np.abs(x - y).max() for x, y in pairs)
    assert moved > 1e-3  # a hundred times what the devices may differ by
    for state, aux_many in found.values():
        assert_close(parallel.first_copy(state).params, one.params, atol=1e-5, rtol=0)
        assert_close(parallel.first_copy(state), one)
        assert_close(parallel.first_copy(aux_many.metrics), aux.metrics, atol=1e-4, rtol=1e-4)
        if aux.priority is not None:
            assert_close(np.asarray(aux_many.priority), np.asarray(aux.priority), atol=1e-4, rtol=1e-4)
    if not loaded or (m.algo.on_policy and name != "ppo"):
        return
    theirs = jax.pmap(run, axis_name=parallel.AXIS, in_axes=(0, 0, None))
    stacked = jax.tree.map(lambda x: np.stack([x] * 4), m.state)
    state, aux = jax.block_until_ready(theirs(stacked, fakes.per_device(data, 4, axis=1), keys))
    for device in range(4):
        assert_close(fakes.part(state, device), parallel.first_copy(found[4][0]), atol=1e-7, rtol=1e-6)
    assert_close(fakes.part(aux.metrics, 0), parallel.first_copy(found[4][1].metrics))


@each_variant
def test_void_rows_change_nothing(name, loaded):
    m = made(name, loaded)
    void = ~np.asarray(m.data.mask) if m.algo.on_policy else np.asarray(m.data.weight) == 0
    assert void.sum() >= 8

    def spoil(x, values):
        x = np.array(x)
        x[void] = values.astype(x.dtype)[void]
        return x

    before, aux = m.update(m.state, m.data, KEY)
    for seed, scale in ((0, 1.0), (1, 1e30), (2, np.inf), (3, np.nan)):
        rng = np.random.default_rng(seed)
        noise = scale * rng.normal(size=(3, *void.shape))
        action = noise[2] if isinstance(m.spec.action, Box) else rng.integers(0, 3, void.shape)
        action = np.broadcast_to(
            np.expand_dims(action, tuple(range(void.ndim, m.data.action.ndim))), m.data.action.shape
        )
        changes = {"reward": spoil(m.data.reward, noise[1]), "action": spoil(m.data.action, action)}
        if m.algo.on_policy and "log_prob" in m.data.extras:
            changes["extras"] = {**m.data.extras, "log_prob": spoil(m.data.extras["log_prob"], noise[0])}
        if not m.algo.on_policy:
            changes["discount"] = spoil(m.data.discount, noise[0])
        after, spoiled_aux = m.update(m.state, m.data.replace(**changes), KEY)
        assert_same((before, aux.metrics), (after, spoiled_aux.metrics), f"scale {scale}: ")
    # and the same change on a row that counts is seen
    counts = ~void & ~np.asarray(m.data.terminated | m.data.truncated) if m.algo.on_policy else ~void
    row = tuple(np.argwhere(counts)[0])
    reward, action = np.array(m.data.reward), np.array(m.data.action)
    one = (np.arange(reward.size) == np.ravel_multi_index(row, reward.shape)).reshape(reward.shape)
    # a Huber loss has one slope for all far rewards of a side
    changed = [m.data.replace(reward=reward + np.float32(change) * one) for change in (1.0, -1e3)]
    if name in ("bc", "dt"):  # they read no rewards
        changed = [m.data.replace(action=np.where(one, (action + 1) % 3, action))]
    assert any(differ(before.params, m.update(m.state, data, KEY)[0].params) for data in changed)


@pytest.mark.parametrize(("name", "rows"), [("ppo", 7), ("a2c", 12), ("pqn", 16)])
def test_a_gradient_in_chunks_is_that_of_the_whole(name, rows, monkeypatch):
    """`microbatch_size` where an algorithm has it; else what the processor's cache asks for."""
    m = made(name, False)
    state, aux = m.update(m.state, m.data, KEY)
    options = {"microbatch_size": rows} if hasattr(fakes.config(name), "microbatch_size") else {}
    if not options:
        monkeypatch.setattr(minibatch, "chunk_rows", lambda num_rows, *limits, length=1: math.gcd(num_rows, rows))
    parts, parts_aux = jax.jit(fakes.learn(fakes.make(name, m.spec, NETWORK, **options)))(m.state, m.data, KEY)
    assert_close(parts, state, atol=5e-6)
    assert_close(parts_aux.metrics, aux.metrics, atol=5e-6)


@each_variant
def test_save_restore_continue(name, loaded, tmp_path):
    m = made(name, loaded)
    straight, batches = m.state, m.batches(4)
    given, stop = (["data.input=nowhere"], "updates=1e5") if fakes.from_data(name) else ([], "env_steps=1e5")
    run = config.load(None, given, algo=name, env="CartPole-v1", stop=[stop])
    for i, data in enumerate(batches):
        if i == 2:
            meta = checkpoint.build_meta(run, m.spec, counters={"iteration": i, "env_steps": i, "time_s": 0.0})
            with Checkpointer(tmp_path / "checkpoints") as checkpoints:
                checkpoints.save(i, {"learner": straight}, meta)
        straight, _ = m.update(straight, data, jax.random.fold_in(KEY, i))
    template = jax.eval_shape(m.algo.init, KEY)
    resumed = checkpoint.restore(checkpoint.locate(tmp_path), "learner", template)
    assert differ(resumed, straight)
    for i, data in enumerate(batches[2:], 2):
        resumed, _ = m.update(resumed, data, jax.random.fold_in(KEY, i))
    assert_same(straight, resumed)


@each_variant
def test_extreme_data_leave_everything_finite(name, loaded):
    m = made(name, loaded)
    zeros, ones = jnp.zeros_like(m.data.reward), jnp.ones_like(m.data.reward)
    extreme = {
        "constant rewards": m.data.replace(reward=ones, obs=jax.tree.map(jnp.ones_like, m.data.obs)),
        "no reward": m.data.replace(reward=zeros),
        "huge rewards": m.data.replace(reward=1e8 * m.data.reward),
    }
    if m.algo.on_policy:
        nothing = jnp.zeros_like(m.data.mask)
        only = nothing.at[2, 3].set(True)
        extreme |= {
            "one row": m.data.replace(mask=only, terminated=nothing, truncated=nothing),
            "no row": m.data.replace(mask=nothing, terminated=nothing, truncated=nothing),
            "every row ends": m.data.replace(terminated=~nothing, truncated=nothing),
        }
    else:
        extreme |= {
            "one row": m.data.replace(weight=zeros.at[3].set(64.0)),
            "no row": m.data.replace(weight=zeros),
            "every row ends": m.data.replace(discount=zeros),
        }
    for what, data in extreme.items():
        state = m.init(KEY)
        for i in range(3):
            state, aux = m.update(state, data, jax.random.fold_in(KEY, i))
        for path, leaf in jax.tree_util.tree_leaves_with_path((state, aux.metrics)):
            assert np.isfinite(leaf).all(), f"{what}: {jax.tree_util.keystr(path)}"


@pytest.mark.parametrize("name", [n for n in NAMES if not fakes.make(n).on_policy])
def test_steps_are_counted_when_they_come_and_updates_when_they_are_made(name):
    spec = fakes.spec(name=name)
    algo = fakes.make(name, spec, NETWORK)
    ones = lambda like: jax.tree.map(lambda x: np.ones(x.shape, x.dtype), like)
    state = ones(jax.eval_shape(algo.init, KEY))
    actor = algo.actor(state)
    rollout = ones(jax.eval_shape(functools.partial(fakes.rollout, algo, spec), actor))
    batch = fakes.batch(algo, spec, actor)
    state = state.replace(env_steps=np.uint32(0), updates=np.uint32(0))
    mask = fakes.flags(np.random.default_rng(0), *rollout.mask.shape)[2]
    ingest, update = jax.jit(algo.ingest), jax.jit(algo.update)

    @jax.jit
    def counted(state, rollout):  # what these numbers do not need is not compiled
        came = ingest(ingest(state, rollout), rollout)
        learned = update(update(came, batch, KEY)[0], batch, KEY)[0]
        return (came.env_steps, came.updates, learned.env_steps, learned.updates), came.params

    counts, params = counted(state, rollout.replace(mask=mask))
    steps = 2 * mask.sum()
    assert tuple(map(int, counts)) == (steps, 0, steps, 2)
    assert_same(params, state.params)


@each
def test_the_config_says_what_it_learns_from(name):
    algo = fakes.make(name)
    assert learns_from(algos.get(name).Config) is type(algo.data)
    assert algo.on_policy == isinstance(algo.data, Fresh)
