"""No program copies the buffer: its memory, its aliases, and the address of its arrays before and after."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from replay_oracle import struct

from jrl.learn import memory, parallel
from jrl.replay import prioritized, ring, sequences
from jrl.replay.hindsight import Hindsight
from jrl.types import Rollout

B, T, FRAME, WIDTH, CAPACITY = 4, 3, (4, 8, 8), 20, 80_000
SIZES = {"capacity": CAPACITY, "num_envs": B, "batch_size": 8}


def spaces():
    obs = {"image": struct(FRAME, "uint8"), "vector": struct((WIDTH,))}
    return obs | {"achieved_goal": struct((2,)), "desired_goal": struct((2,))}, struct((), "int32")


def goal_reward(achieved, desired):
    return achieved.sum(1), (achieved == desired).all(1)


BUFFERS = {
    "ring": lambda: ring.make(*spaces(), gamma=0.9, n_step=3, **SIZES),
    "stack": lambda: ring.make(*spaces(), gamma=0.9, frame_stack=ring.FrameStack(4), **SIZES),
    "hindsight": lambda: ring.make(*spaces(), gamma=0.9, hindsight=Hindsight("future", 0.8, goal_reward), **SIZES),
    "prioritized": lambda: prioritized.make(*spaces(), gamma=0.9, alpha=0.6, beta=0.4, **SIZES),
    "sequences": lambda: sequences.make(*spaces(), gamma=0.9, length=4, burn_in=2, alpha=0.6, **SIZES),
}


def rollout_of(T):
    ones = lambda shape, dtype: jax.device_put(np.ones(shape, dtype))
    obs = lambda *lead: jax.tree.map(lambda x: ones((*lead, *x.shape), x.dtype), spaces()[0])
    yes, no = ones((T, B), bool), jax.device_put(np.zeros((T, B), bool))
    reward = ones((T, B), np.float32)
    return Rollout(obs(T, B), obs(B), ones((T, B), np.int32), reward, no, no, yes, ones(B, bool), {}, ())


def add(buffer):
    return lambda state, rollout, count: (buffer.add(state, rollout), 0.0)


def learn(buffer):
    """As the learner does: add, then `count` times sample, use, and set priorities."""

    def body(i, carry):
        state, total = carry
        sample = buffer.sample(state, jax.random.fold_in(jax.random.key(0), i))
        obs = sample.window.obs if hasattr(sample, "window") else sample.obs
        value = obs["vector"].mean() * sample.weight.reshape(sample.index.shape[0], -1).mean(1) + sample.reward.sum()
        if buffer.set_priority is not None:
            state = buffer.set_priority(state, sample.index, jnp.abs(value))
        return state, total + value.sum()

    def step(state, rollout, count):
        state = buffer.add(state, rollout)
        count = jnp.where(buffer.can_sample(state), count, 0)
        return jax.lax.fori_loop(0, count, body, (state, 0.0))

    return step


def scanned(buffer):
    """As the fused program does: several iterations, each of which adds and learns."""
    step = learn(buffer)

    def run(state, rollout, count):
        return jax.lax.scan(lambda s, _: step(s, rollout, count), state, length=3)

    return run


def on_a_device(step):
    """As the loop does: leaves of all devices lie one behind the other, and scalars have an axis of their own."""

    def body(state, rollout, count):
        state, total = step(jax.tree.map(lambda x: x[0] if x.size == 1 else x, state), rollout, count)
        return jax.tree.map(lambda x: x[None] if x.ndim == 0 else x, state), total

    specs = (parallel.PER_DEVICE, parallel.ROLLOUT, parallel.REPLICATED)
    out_specs = (parallel.PER_DEVICE, parallel.REPLICATED)
    return parallel.pmap(body, parallel.make_mesh(1), specs, out_specs, donate_argnums=(0,))


def faults(program, state, rollout):
    """What is wrong with how a program with a donated buffer treats it."""
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    rings = lambda state: [x for x in jax.tree.leaves(state) if x.size > 1]
    # what a program needs beside the buffer: samples and rollouts, whatever the buffer's size
    allowed = 8 * sum(x.nbytes for x in jax.tree.leaves(rollout)) + 25_000
    assert allowed < min(x.nbytes for x in rings(state))  # so that a copy of the least array of the ring would show
    compiled = program.lower(state, rollout, jnp.int32(0)).compile()
    found, analysis = [], compiled.memory_analysis()
    if analysis.temp_size_in_bytes > allowed:
        found.append(f"temporary: {analysis.temp_size_in_bytes} of {size}")
    if analysis.alias_size_in_bytes < size:
        found.append(f"alias: {analysis.alias_size_in_bytes} of {size}")
    text = compiled.as_text()
    if "input_output_alias" not in text:
        found.append("no input_output_alias")
    for x in rings(state):
        kind = {"float32": "f32", "int32": "s32", "uint8": "u8", "uint32": "u32"}[str(x.dtype)]
        shape = f"= {kind}[{','.join(map(str, x.shape))}]"
        found += [line.strip()[:100] for line in text.splitlines() if shape in line and " copy(" in line]
    address = lambda state: [x.unsafe_buffer_pointer() for x in rings(state)]
    before = address(state)
    for count in (0, 2, 3):
        state, _ = program(state, rollout, jnp.int32(count))
        if address(state) != before:
            found.append("another address")
    return found


@pytest.mark.parametrize(("length", "name"), [((1, T)[j % 2], name) for j, name in enumerate(BUFFERS)])
def test_in_place(name, length):
    buffer = BUFFERS[name]()
    assert faults(jax.jit(add(buffer), donate_argnums=0), buffer.init(), rollout_of(length)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "program", "name"),
    [
        ((1, T)[(i + j) % 2], program, name)
        for i, program in enumerate((learn, scanned))
        for j, name in enumerate(BUFFERS)
    ],
)
def test_in_place_when_mapped_over_devices(name, program, length):
    """What learns, as a run has it."""
    buffer = BUFFERS[name]()
    state = jax.tree.map(lambda x: x[None] if x.ndim == 0 else x, buffer.init())
    state = parallel.shard(state, parallel.make_mesh(1))
    assert faults(on_a_device(program(buffer)), state, rollout_of(length)) == []


def test_a_copy_would_be_seen():
    buffer = BUFFERS["prioritized"]()

    def sample_first(state, rollout, count):
        sample = buffer.sample(state, jax.random.key(0))
        return buffer.add(state, rollout), sample.obs["vector"].sum()

    found = faults(jax.jit(sample_first, donate_argnums=0), buffer.init(), rollout_of(T))
    assert any(fault.startswith("temporary") for fault in found)
    assert any(" copy(" in fault for fault in found)
    found = faults(jax.jit(add(buffer)), buffer.init(), rollout_of(T))  # not donated
    assert "no input_output_alias" in found
    assert "another address" in found


def test_each_device_has_its_own(four_devices):
    """The same program on four devices: each adds its columns and samples from them."""
    buffer = BUFFERS["prioritized"]()
    columns = np.arange(4 * B, dtype=np.float32)[None]
    whole = jax.device_get(rollout_of(T))
    wide = lambda x, axis: np.concatenate([x] * 4, axis)
    rollout = Rollout(
        obs=jax.tree.map(lambda x: wide(x, 1), whole.obs),
        last_obs=jax.tree.map(lambda x: wide(x, 0), whole.last_obs),
        action=wide(whole.action, 1),
        reward=np.broadcast_to(columns, (T, 4 * B)),
        terminated=wide(whole.terminated, 1),
        truncated=wide(whole.truncated, 1),
        mask=wide(whole.mask, 1),
        contiguous=wide(whole.contiguous, 0),
        extras={},
        carry=(),
    )

    def body(state, rollout):
        state = buffer.add(jax.tree.map(lambda x: x[0], state), rollout)
        key = jax.random.fold_in(jax.random.key(0), jax.lax.axis_index(parallel.AXIS))
        return jax.tree.map(lambda x: x[None], state), buffer.sample(state, key).reward[None]

    specs = (parallel.PER_DEVICE, parallel.ROLLOUT)
    program = parallel.pmap(body, four_devices, specs, (parallel.PER_DEVICE,) * 2, donate_argnums=(0,))
    state = jax.tree.map(lambda x: np.stack([x] * 4), jax.device_get(buffer.init()))
    state, reward = jax.block_until_ready(
        program(parallel.shard(state, four_devices), parallel.shard(rollout, four_devices, parallel.ROLLOUT))
    )
    assert reward.shape == (4, SIZES["batch_size"])
    for device in range(4):
        assert set(np.asarray(reward[device])) == set(range(device * B, (device + 1) * B))


def test_frame_stacks_are_stored_once():
    whole, once = (memory.nbytes(BUFFERS[name]()) for name in ("ring", "stack"))
    image, goals, rest = 4 * 64, 2 * 2 * 4, 4 * WIDTH + 4 + 4 + 1
    assert abs(whole - CAPACITY * (image + goals + rest)) < 100
    assert abs(once - CAPACITY * (image / 4 + goals + rest)) < 100
