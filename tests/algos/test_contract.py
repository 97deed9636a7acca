"""What holds for every registered algorithm, as one table: an algorithm in a setting is made once for all properties.

Settings: the defaults, every option on, each space of actions and observations, masks, dictionaries with what the
critic alone reads, memory. Properties: pure, arrays only, the same anywhere, blind to void rows, finite, continued.
"""

import dataclasses
import functools
import math
import typing

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, some_quick
from fakes import assert_close, assert_same, differ
from jax.sharding import PartitionSpec as P

from jrl import algos, config
from jrl.algos.critic_heads import Critic
from jrl.algos.curiosity import Rnd
from jrl.algos.exploration import EpsilonGreedy
from jrl.fields import hyper
from jrl.fields.data import Fresh, learns_from
from jrl.learn import parallel
from jrl.networks import NetworkConfig
from jrl.ops import minibatch
from jrl.run.store import checkpoint
from jrl.run.store.writer import Checkpointer
from jrl.types import (
    NEXT_ACTION,
    TEACHER,
    Batch,
    Box,
    Dict,
    Discrete,
    EnvSpec,
    MultiBinary,
    MultiDiscrete,
    Rollout,
    SequenceBatch,
    UpdateAux,
)

NAMES = algos.names()
KEY = jax.random.key(11)
NETWORK = dataclasses.replace(fakes.NETWORK, hidden=(8,))


def traced(cfg):
    return jax.tree.map(np.float32, cfg)


def stack(trees):
    return jax.tree.map(lambda *x: np.stack(x), *jax.device_get(list(trees)))


# ---------------------------------------------------------------- settings


class Made:
    """One algorithm in one setting, its jitted functions, a state away from its start and what it learns from."""

    def __init__(self, name, env_spec=None, network=NETWORK, **overrides):
        self.name, self.network, self.overrides = name, network, overrides
        self.spec = env_spec or fakes.spec(name=name)
        self.algo = fakes.make(name, self.spec, network, **overrides)
        self.cfg = fakes.config(name, **overrides)
        self.init, self.updated = jax.jit(self.algo.init), jax.jit(self.of)
        self.act = jax.jit(self.algo.act, static_argnames="explore")
        self.state = fakes.perturbed(fakes.made_up_state(self.algo))
        self.actor = self.algo.actor(self.state)
        self.data = self.batches(1)[0]

    @functools.cached_property
    def obs(self):
        """[B, *]"""
        return jax.tree.map(lambda x: x[0], self.data.obs) if self.algo.on_policy else self.data.obs

    @functools.cached_property
    def carry(self):
        return self.algo.carry(len(jax.tree.leaves(self.obs)[0]))

    def of(self, cfg, state, data, key):
        """What comes of new data, with the floats of `cfg`."""
        return fakes.learn(algos.get(self.name).make(cfg, self.spec, self.network))(state, data, key)

    def update(self, state, data, key):
        """The algorithm's own, with floats that are traced: one program for all of their values."""
        return self.updated(traced(self.cfg), state, data, key)

    @functools.cached_property
    def together(self):
        """`of`, of lanes that differ in everything."""
        return jax.jit(jax.vmap(self.of))

    def batches(self, count):
        return [fakes.data(self.algo, self.spec, self.actor, seed=seed) for seed in range(count)]


class Remembers(Made):
    """With memory, or a mask of actions: data of steps in a row."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.state = self.state.replace(updates=jnp.uint32(1))  # an odd number: the next is one of the policy, too

    def batches(self, count):
        burn_in = 0 if fakes.plays_for_a_return(self.name) else 2
        data = fakes.drawn(self.algo, self.spec, self.actor, burn_in=burn_in)
        return [data.replace(weight=data.weight.at[:3].set(0.0)) if isinstance(data, Batch) else data] * count


# of floats that are null by default and in LOADED, so that there is something to trace
FLOATS = {"max_leaf_norm": 0.7, "max_grad_value": 0.02, "max_grad_norm": 0.5, "actor_lr": 1e-3, "ent_coef_lr": 2e-3}
FLOATS |= {"target_entropy": 0.5, "target_kl": 0.5, "kl_target": 0.01, "kl_coef": 0.2, "value_clip_eps": 0.2}
FLOATS |= {"bc_alpha": 2.5, "value_lr": 1e-3, "top_fraction": 0.5, "normalize_reward_bound": 5.0}


def unset(cfg):
    """Names of the floats that are null, but for those that another key of the Config excludes."""
    excluded = {"target_sigma"} | (set() if cfg.normalize_reward else {"normalize_reward_bound"})
    excluded |= set() if getattr(cfg, "target_kl", None) is None else {"rpo_alpha"}
    hints = typing.get_type_hints(type(cfg))
    return {n for n, hint in hints.items() if getattr(cfg, n) is None and "float" in str(hint)} - excluded


BOX = Box((2,), low=-1.0, high=1.0)
SQUARE = Box((2, 2), low=-1.0, high=1.0)
ACTIONS = [Discrete(3), MultiDiscrete((3, 2)), SQUARE, fakes.BOX]
IMAGE = Box((9, 9, 2), "uint8", 0, 255)
# vectors are those of all other tests
OBSERVATIONS = [Box((4, 2)), Box((6,), "uint8", 0, 255), Discrete(5), MultiDiscrete((3, 2))]
NESTED = Dict((("motion", Box((3,))), ("at", Box((2,)))))
MASKED = Dict((("action_mask", MultiBinary((3,))), ("x", Box((3,)))))
PRIVILEGED = Dict((("x", Box((3,))), ("state", Box((2,)))))  # the critic alone reads the state
CORES = {"gru": hyper.Gru(size=6), "lstm": hyper.Lstm(size=6)}
C51, QUANTILES = Critic(kind="c51", atoms=7, value_range=(-3.0, 3.0)), Critic(kind="quantiles", atoms=5)
# what may go wrong with memory and one of them alone
OPTIONS = {
    "ppo": ({}, {"curiosity": Rnd(hidden=(8,), features=4), "normalize_obs": True}),
    "dqn": (
        {"noisy": True, "dueling": True, "head": "c51", "double": True},
        {"munchausen": True, "head": "qr"},
        {"value_rescaling": True, "normalize_obs": True, "normalize_reward": True},
    ),
    "sac": (
        {"policy_every": 2, "max_grad_norm": 1.0, "normalize_obs": True, "critic": C51},
        {"num_critics": 3, "target_critics": 2, "conservative": True, "cql_actions": 2},
    ),
    "td3": ({"policy_every": 1, "actor_bc": 0.5, "critic_bc": 0.2, "critic": QUANTILES},),
    "marwil": ({"normalize_obs": True, "normalize_reward": True}, {"weight": "softmax"}, {"weight": "binary"}),
}


def masks_actions(name):
    return fakes.acts_in(name, Discrete) or fakes.in_teams(name)


def spec(name, observation, num_envs=fakes.COLUMNS):
    if fakes.in_teams(name):
        return fakes.spec(observation=observation, num_envs=num_envs, name=name)
    action = Discrete(3) if fakes.acts_in(name, Discrete) else BOX
    return EnvSpec(fakes.observes(name, observation), action, num_envs)


def memory(name, core, observation):
    """A network with memory; the state of an observation is the critic's or the teacher's alone, if there is one."""
    apart = observation is PRIVILEGED and (algos.get_config_class(name).has_critic or fakes.has_teacher(name))
    more = {"value_inputs": ("state",)} if apart else {}
    return NetworkConfig(hidden=(8,), core=CORES[core], max_seq_len=4, **more)


@functools.cache
def made(name, setting):
    """`setting`: a word; one with memory and which of OPTIONS; or a pair of spaces (action, observation)."""
    if setting == "default":
        return Made(name)
    if setting == "loaded":
        cfg = fakes.config(name, **CASES[name].loaded)
        return Made(name, **{n: FLOATS[n] for n in unset(cfg) & FLOATS.keys()}, **CASES[name].loaded)
    if setting == "masked":
        return Remembers(name, spec(name, MASKED), NetworkConfig(hidden=(8,)))
    kind, which = setting
    if kind in MEMORIES:
        core, observation = MEMORIES[kind]
        options = OPTIONS.get(name, ({},))[which]
        return Remembers(name, spec(name, observation), memory(name, core, observation), **options)
    network = NetworkConfig(hidden=(8,)) if len(which.shape) < 3 else NetworkConfig(torso="impala")
    options = {"normalize_obs": True} if hasattr(fakes.config(name), "normalize_obs") else {}
    return Made(name, fakes.spec(kind, which, name=name), network, **options)


MEMORIES = {"gru, privileged": ("gru", PRIVILEGED), "lstm, masked": ("lstm", MASKED)}
REMEMBERED = [
    (name, (kind, which))
    for name in NAMES
    for kind, (_, observation) in MEMORIES.items()
    if algos.get_config_class(name).has_memory
    if observation is not MASKED or masks_actions(name)
    for which in range(len(OPTIONS.get(name, ({},))))
]
IN_MASKS = [(name, "masked") for name in NAMES if masks_actions(name)]


def seen(name, action):
    """The observations of this action in all tests: other ones for each action and algorithm."""
    return OBSERVATIONS[(ACTIONS.index(action) + NAMES.index(name)) % len(OBSERVATIONS)]


SPACES = [
    (name, (action, seen(name, action)))
    for name in NAMES
    for action in ACTIONS
    if fakes.acts_in(name, type(action)) and not (action is fakes.BOX and CASES[name].like)
]
SEEN = [  # each other observation, with one action
    (name, (fakes.spec(name=name).action, observation))
    for name in NAMES
    if CASES[name].like != "ppo"
    for observation in (*OBSERVATIONS, IMAGE)
    if not any(of == name and observed == observation for of, (_, observed) in SPACES)
]
QUICK = [
    (name, (action, seen(name, action))) for name, action in (("ppo", SQUARE), ("dqn", ACTIONS[0]), ("sac", SQUARE))
]

# in `make test` one of each kind, with every option on
each = pytest.mark.parametrize("name", some_quick(NAMES, *(n for n in NAMES if not CASES[n].like)))
OPTIONED = [(name, options) for name in NAMES for options in ("default", "loaded")]
LOADED = [(name, "loaded") for name in NAMES if not CASES[name].like]
each_variant = pytest.mark.parametrize(("name", "setting"), some_quick(OPTIONED, *LOADED))


# ---------------------------------------------------------------- properties


@each_variant
def test_state_and_actor_hold_arrays_and_the_same_key_gives_the_same(name, setting):
    m = made(name, setting)
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
    assert_same(state, m.init(KEY))
    (after, aux), again = (m.update(state, m.data, KEY) for _ in range(2))
    assert jax.tree.structure(state) == jax.tree.structure(after)  # it can be a scan's carry
    signature = lambda tree: [(x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(tree)]
    assert signature(state) == signature(after) == signature(shapes)
    assert_same((after, aux), again)
    assert_same(m.act(m.actor, m.obs, m.carry, KEY), m.act(m.actor, m.obs, m.carry, KEY))
    assert aux.metrics
    for key, value in aux.metrics.items():
        assert value.shape == () and np.isfinite(value), key


@each
def test_another_key_gives_another(name):
    m = made(name, "loaded")  # DQN's gradient step reads its key for noisy layers only
    other = jax.random.key(12)
    assert differ(m.init(KEY), m.init(other))
    # the one step of these on all that there is draws nothing
    if name not in ("a2c", "vdn", "iql", "mpo", "awr", "bc", "marwil", "dt"):
        assert differ(m.update(m.state, m.data, KEY)[0], m.update(m.state, m.data, other)[0])
    if not fakes.has_members(name):  # members of a population act without noise
        assert differ(m.act(m.actor, m.obs, m.carry, KEY), m.act(m.actor, m.obs, m.carry, other))
    assert differ(m.state.params, m.update(m.state, m.data, KEY)[0].params)  # and it learns at all


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_vmap_over_seeds(name):
    m = made(name, "loaded")
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


@pytest.mark.slow  # two large programs of each; tests/sweep/test_population.py has one in the quick set
@pytest.mark.parametrize("name", NAMES)
def test_vmap_over_any_float_is_a_loop_over_it(name):
    """No Python branch reads a float of the Config: traced or not, one by one or in a batch, they mean the same."""
    m = made(name, "loaded")
    cfgs = each_float(fakes.config(name, **m.overrides))
    assert not unset(cfgs[0])
    positive = {"ent_coef", "kl_coef"} if name == "reppo" else set()  # its duals, which cannot be 0
    edges = {n: x for n, x in EDGES.items() if isinstance(getattr(cfgs[0], n, None), float) and n not in positive}
    cfgs.append(dataclasses.replace(cfgs[0], **edges, **({"kl_target": None} if hasattr(cfgs[0], "kl_target") else {})))

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


@pytest.mark.parametrize(("name", "setting"), some_quick(OPTIONED, ("dqn", "default")))
def test_any_number_of_devices_learns_the_same(name, setting):
    """The same global batches on one device and on several."""
    m, loaded = made(name, setting), setting == "loaded"
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


def spoiled(data, scale):
    """(which rows are void, the same with other contents of these, whatever they may be)"""
    data, rng = jax.device_get(data), np.random.default_rng(int(min(scale, 2)) if scale == scale else 3)
    void = ~data.mask if isinstance(data, Rollout) else data.weight == 0
    fill = lambda x, values: np.where(void.reshape(*void.shape, *[1] * (x.ndim - void.ndim)), values, x)
    other = lambda x: fill(x, (scale * rng.normal(size=x.shape)).astype(np.float32))
    changes = {"reward": other(data.reward)}
    if data.action.dtype == np.float32:
        changes["action"] = other(data.action)
    else:
        changes["action"] = fill(
            data.action,
            rng.integers(0, 2, data.action.shape, np.int32) if isinstance(data, Rollout) else np.int32(2**30),
        )
    if isinstance(data, Rollout):
        spoil = lambda k, x: jax.tree.map(other, x) if k in ("log_prob", TEACHER) else x
        changes["extras"] = {k: spoil(k, x) for k, x in data.extras.items()}
        return void, data.replace(**changes)
    changes["discount"] = other(data.discount)
    known = data.extras[NEXT_ACTION]
    unknown = ~known["valid"].reshape(*known["valid"].shape, *[1] * (data.action.ndim - void.ndim))
    after = np.where(unknown, changes["action"].max(), fill(known["action"], changes["action"].max()))
    changes["extras"] = {**data.extras, NEXT_ACTION: {**known, "action": after}}
    if isinstance(data, SequenceBatch):
        # observations that no row before led to; the others are what a time limit is bootstrapped from
        reset = data.window.reset
        unread = reset & np.concatenate([np.ones_like(reset[:, :1]), reset[:, :-1]], 1)
        behind = lambda x: unread.reshape(*unread.shape, *[1] * (x.ndim - unread.ndim))
        hide = lambda x: np.where(behind(x), np.nan, x) if x.dtype == np.float32 else x
        changes["window"] = data.window.replace(obs=jax.tree.map(hide, data.window.obs))
        changes["ahead"] = fill(data.ahead, 2**30)
    return void, data.replace(**changes)


BOXES = [(name, setting) for name, setting in SPACES if setting[0] is SQUARE]  # their log-probability may overflow
VOID = [*OPTIONED, *BOXES, *IN_MASKS, *REMEMBERED]
VOID_QUICK = [*LOADED, ("sac", (SQUARE, seen("sac", SQUARE))), ("ppo", (SQUARE, seen("ppo", SQUARE)))]


@pytest.mark.parametrize(("name", "setting"), some_quick(VOID, *VOID_QUICK), ids=str)
def test_void_rows_change_nothing(name, setting):
    """And the others reach every memory, of policy and critics."""
    m = made(name, setting)
    void = spoiled(m.data, 1.0)[0]
    assert 0 < void.sum() < void.size
    before, aux = m.update(m.state, m.data, KEY)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((before, aux)))
    for scale in (1.0, 1e30, np.inf, np.nan):
        after = m.update(m.state, spoiled(m.data, scale)[1], KEY)
        assert_same((before, aux), after, f"scale {scale}: ")
    old, new = (jax.tree_util.tree_leaves_with_path(x.params) for x in (m.state, before))
    for (path, was), (_, now) in zip(old, new, strict=True):
        if "core" in (leaf := jax.tree_util.keystr(path)) and "kernel" in leaf:
            assert differ(was, now), leaf
    # and the same change on a row that counts is seen
    counts = ~void & ~np.asarray(m.data.terminated | m.data.truncated) if m.algo.on_policy else ~void
    reward, action, changed = np.asarray(m.data.reward), np.asarray(m.data.action), []
    places = np.argwhere(counts)
    for place in (places[0], places[len(places) // 2]):  # all actions of a row may be masked
        row = np.zeros(void.shape, bool)
        row[tuple(place)] = True
        if name in ("bc", "dt"):  # they read no rewards
            row = row.reshape(*row.shape, *[1] * (action.ndim - row.ndim))
            changed.append(m.data.replace(action=np.where(row, (action + 1) % 2, action)))
        elif fakes.has_teacher(name):  # distillation reads the teacher's labels alone
            add = lambda x, row=row: x + row.reshape(*row.shape, *[1] * (x.ndim - row.ndim)) * np.arange(x.shape[-1])
            label = jax.tree.map(add, m.data.extras[TEACHER])
            changed.append(m.data.replace(extras={**m.data.extras, TEACHER: label}))
        else:  # a Huber loss has one slope for all far rewards of a side
            changed += [m.data.replace(reward=reward + np.float32(change) * row) for change in (1.0, -1e3)]
    assert any(differ(before.params, m.update(m.state, data, KEY)[0].params) for data in changed)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rows"), (("ppo", 7), ("a2c", 12), ("pqn", 16)))
def test_a_gradient_in_chunks_is_that_of_the_whole(name, rows, monkeypatch):
    """`microbatch_size` where an algorithm has it; else what the processor's cache asks for."""
    m = made(name, "default")
    state, aux = m.update(m.state, m.data, KEY)
    options = {"microbatch_size": rows} if hasattr(fakes.config(name), "microbatch_size") else {}
    if not options:
        monkeypatch.setattr(minibatch, "chunk_rows", lambda num_rows, *limits, length=1: math.gcd(num_rows, rows))
    parts, parts_aux = jax.jit(fakes.learn(fakes.make(name, m.spec, NETWORK, **options)))(m.state, m.data, KEY)
    assert_close(parts, state, atol=5e-6)
    assert_close(parts_aux.metrics, aux.metrics, atol=5e-6)


@each_variant
def test_save_restore_continue(name, setting, tmp_path):
    m = made(name, setting)
    straight, batches = m.state, m.batches(4)
    given, stop = (["data.input=nowhere"], "updates=1e5") if fakes.from_data(name) else ([], "env_steps=1e5")
    given += ["algo.teacher=nowhere"] if fakes.has_teacher(name) else []
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
def test_extreme_data_leave_everything_finite(name, setting):
    m = made(name, setting)
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


# ---------------------------------------------------------------- spaces, dictionaries, memory


@pytest.mark.parametrize(("name", "setting"), some_quick([*SPACES, *SEEN], *QUICK), ids=str)
def test_spaces(name, setting):
    """Shapes and dtypes of actions, and an update that moves the parameters and leaves them finite."""
    m, (action, observation) = made(name, setting), setting
    taken = m.data.action if m.algo.on_policy else m.act(m.actor, m.obs, m.carry, KEY).action
    assert taken.shape == ((8, 8) if m.algo.on_policy else (64,)) + action.shape
    assert taken.dtype == m.data.action.dtype == action.dtype
    # a made-up network prefers one action in all images, and a member that acts without noise may do so, too
    if not isinstance(action, Box) and observation is not IMAGE and not fakes.has_members(name):
        high = np.asarray(action.n if isinstance(action, Discrete) else action.nvec) - 1
        flat = np.asarray(taken).reshape(64, *action.shape)
        np.testing.assert_array_equal(flat.min(0), np.zeros_like(high))
        np.testing.assert_array_equal(flat.max(0), high)  # every choice is taken
    after, aux = m.update(m.state, m.data, KEY)
    assert differ(m.state.params, after.params)
    for leaf in jax.tree.leaves((after, aux.metrics)):
        assert np.isfinite(leaf).all()


@pytest.mark.parametrize(("name", "setting"), some_quick(SPACES, *QUICK), ids=str)
def test_without_exploration_the_best_action_is_taken(name, setting):
    m, (action, _) = made(name, setting), setting
    act, actor, rows = m.act, m.actor, len(jax.tree.leaves(m.obs)[0])
    best = act(actor, m.obs, m.carry, KEY, explore=False)
    assert_same(best, act(actor, m.obs, m.carry, jax.random.key(0), explore=False))
    assert (best.action.shape, best.action.dtype) == ((rows, *action.shape), action.dtype)
    samples = jax.device_get([act(actor, m.obs, m.carry, key) for key in jax.random.split(KEY, 200)])
    assert differ(best.action if fakes.has_members(name) else samples[0].action, samples[1].action)
    taken = np.stack([s.action for s in samples])
    # a Gaussian that is not bounded: the mode is the mean
    if isinstance(action, Box) and "log_prob" in best.extras:
        deviation = taken.std(0)
        assert (np.abs(taken.mean(0) - best.action) < 5 * deviation / np.sqrt(200)).all()
    if "log_prob" in best.extras:
        assert (
            np.stack([s.extras["log_prob"] for s in samples]) <= np.asarray(best.extras["log_prob"])[None] + 1e-5
        ).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if algos.get_config_class(name).has_memory])
def test_four_devices_learn_with_memory_what_one_learns(name):
    """Of a dictionary, a part of which is the critic's alone where there is one."""
    env_spec, network = spec(name, PRIVILEGED, num_envs=8), memory(name, "lstm", PRIVILEGED)
    m = Remembers(name, env_spec, network)
    algo, state, data = m.algo, m.state, m.data
    alone, _ = jax.jit(algo.update)(state, data, KEY)
    mapped = fakes.make(name, env_spec, network, axis_name=parallel.AXIS)
    update = jax.vmap(lambda state, data: mapped.update(state, data, KEY)[0], axis_name=parallel.AXIS)
    together = jax.jit(update)(jax.tree.map(lambda x: jnp.stack([x] * 4), state), fakes.per_device(data, 4))
    assert differ(alone.params, state.params)
    for device in range(4):
        assert_close(fakes.part(together.params, device), alone.params, atol=2e-5)


@pytest.mark.parametrize("name", some_quick(NAMES, "dqn"))
def test_a_dictionary_of_vectors_is_their_concatenation(name):
    """In the order of the names; the parameters are the same."""
    plain, nested = spec(name, Box((5,)), 8), spec(name, NESTED, 8)
    algo, other = (fakes.make(name, s) for s in (plain, nested))
    state = fakes.perturbed(fakes.made_up_state(algo))
    assert jax.tree.structure(state) == jax.tree.structure(jax.eval_shape(other.init, KEY))
    data = fakes.data(algo, plain, algo.actor(state))
    halves = lambda x: {"at": x[..., :2], "motion": x[..., 2:]}

    def split(x):
        if fakes.in_teams(name):
            return {**x, "agents": halves(x["agents"])}
        return halves(x) if not isinstance(x, dict) else {**halves(x["obs"]), "prev_reward": x["prev_reward"]}

    names = ("obs", "last_obs") if algo.on_policy else ("obs", "next_obs")
    parts = data.replace(**{name: split(getattr(data, name)) for name in names})
    assert_close(jax.jit(other.update)(state, parts, KEY), jax.jit(algo.update)(state, data, KEY), atol=1e-5)


REPLAY = tuple(name for name in NAMES if not fakes.make(name).on_policy)
SINGLE = tuple(name for name in REPLAY if isinstance(fakes.spec(name=name).observation, Box))


@pytest.mark.parametrize("name", some_quick(SINGLE, "dqn"))
def test_running_statistics_are_of_all_rows_that_came(name):
    """What acts and learns sees (obs - mean) / deviation of them; rewards are divided by the return's deviation."""
    env_spec, options = fakes.spec(name=name), {"adam_eps": 1.0, "gamma": 0.9}
    algo = fakes.make(name, env_spec, **options, normalize_obs=True, normalize_reward=True)
    plain = fakes.make(name, env_spec, **options)
    assert algo.running_return_gamma == 0.9 and plain.running_return_gamma is None
    state, rows, returns = fakes.perturbed(fakes.made_up_state(algo)), [], []
    for seed in range(2):
        rollout = fakes.rollout(algo, env_spec, algo.actor(state), seed=seed)
        state = jax.jit(algo.ingest)(state, rollout)
        mask = np.asarray(rollout.mask)
        rows.append(np.asarray(rollout.obs, np.float64)[mask])
        returns.append(np.asarray(rollout.extras["running_return"], np.float64)[mask])
    rows, returns = np.concatenate(rows), np.concatenate(returns)
    np.testing.assert_allclose(state.obs_stats.mean, rows.mean(0), rtol=1e-4, atol=1e-5)
    batch = fakes.batch(algo, env_spec, algo.actor(state), N=32)
    see = lambda x: jnp.asarray((np.asarray(x, np.float64) - rows.mean(0)) / rows.std(0), jnp.float32)
    without = dataclasses.replace(state, obs_stats=(), return_stats=())

    def act(algo, state, obs):
        run = jax.jit(algo.act, static_argnames="explore")
        return run(algo.actor(state), obs, algo.carry(32), KEY, explore=False).action

    np.testing.assert_allclose(act(algo, state, batch.obs), act(plain, without, see(batch.obs)), rtol=1e-3, atol=1e-4)
    seen = batch.replace(
        obs=see(batch.obs), next_obs=see(batch.next_obs), reward=batch.reward / np.float32(returns.std())
    )
    got, aux = jax.jit(algo.update)(state, batch, KEY)
    want, want_aux = jax.jit(plain.update)(without, seen, KEY)
    assert_close(got.params, want.params, atol=1e-4, rtol=1e-3)
    assert_close(aux.metrics, want_aux.metrics, atol=1e-3, rtol=1e-3)
    if aux.priority is not None:
        np.testing.assert_allclose(aux.priority, want_aux.priority, rtol=1e-2, atol=1e-3)
    assert_same((got.obs_stats, got.return_stats), (state.obs_stats, state.return_stats))


@each
def test_the_step_size_follows_the_environment_steps(name):
    """Piecewise linear, and 0 at last, when no parameter moves; also where there are more steps than int32 counts."""
    m = made(name, "loaded")
    cfg = traced(dataclasses.replace(m.cfg, lr=((0, 0.2), (300, 0.0))))
    for steps in (0, 150, 2**31 + 5):
        state = m.state.replace(env_steps=np.uint32(steps))
        after, aux = m.updated(cfg, state, m.data, KEY)
        counted = (
            after if m.algo.on_policy and m.algo.ingest else state
        )  # a rollout, before or after it is learned from
        want = np.interp(float(counted.env_steps), (0, 300), (0.2, 0.0))
        np.testing.assert_allclose(aux.metrics["train/lr"], want, rtol=1e-5)
        # SAC's temperature has a step size of its own, and TRPO's policy has none
        is_fitted = lambda part: name != "trpo" or part.startswith("value_")
        found = ({n: p for n, p in x.params.items() if is_fitted(n)} for x in (state, after))
        before, parts = (params.get("critic", params) for params in found)
        assert differ(before, parts) == (want > 0)


# IQN draws other levels at each step, by which another action may be best
LADDERS = tuple(n for n in NAMES if n != "iqn" and isinstance(fakes.config(n).exploration, EpsilonGreedy))


@pytest.mark.parametrize("name", some_quick(LADDERS, "dqn"))
def test_epsilon_follows_the_environment_steps(name):
    """Of three actions epsilon-greedy takes the best with probability 1 - 2/3 epsilon."""
    env_spec = fakes.spec(name=name)
    algo = fakes.make(name, env_spec, exploration=EpsilonGreedy(epsilon=((0, 1.0), (1000, 0.0))))
    state, act = fakes.perturbed(fakes.made_up_state(algo)), jax.jit(algo.act, static_argnames="explore")
    obs = fakes.observations(np.random.default_rng(0), env_spec.observation, (5000,))
    obs = jax.tree.map(jnp.asarray, obs)
    best = np.asarray(jax.jit(algo.outputs)(state, obs)["q"]).argmax(-1)

    def share(env_steps, explore=True):
        actor = algo.actor(state.replace(env_steps=jnp.uint32(env_steps)))
        return (np.asarray(act(actor, obs, algo.carry(5000), KEY, explore=explore).action) == best).mean()

    assert share(0, explore=False) == 1.0
    shares = [share(0), share(500), share(1000)]
    np.testing.assert_allclose(shares, [1 / 3, 2 / 3, 1.0], atol=0.03)
