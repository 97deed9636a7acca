"""How fast is replay? Each operation of the buffers beside the barest program that could do it, in the same rounds.

    python scripts/bench_replay.py                    # one JSON line per operation
    python scripts/bench_replay.py --only frames --rounds 10

Times are per operation, the best of the rounds. `call` is a jitted function called from Python, `inside` one of many in
a program, as in training. The ring of frames takes 1 GB; two are never alive at once.
"""

import argparse
import json
import time

import jax
import jax.numpy as jnp
import numpy as np

from jrl.replay import prioritized, ring, sum_tree
from jrl.types import Rollout

B, N, FRAMES, LEAVES = 8, 256, 140_000, 2**20


def struct(shape, dtype):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def rollout(obs, steps=1, count=None):
    """`count` rollouts stacked, or one; observations are random, so that nothing of them can be computed beforehand."""
    lead = () if count is None else (count,)
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.integers(0, 255, (*lead, *shape)).astype(obs.dtype))
    no = jnp.zeros((*lead, steps, B), bool)
    return Rollout(
        obs=draw(steps, B, *obs.shape),
        last_obs=draw(B, *obs.shape),
        action=jnp.zeros((*lead, steps, B), jnp.int32),
        reward=jnp.ones((*lead, steps, B)),
        terminated=no,
        truncated=no,
        mask=~no,
        contiguous=jnp.ones((*lead, B), bool),
        extras={},
        carry=(),
    )


def seconds(program, state, *args, calls, donate):
    """Of one call, and the state afterwards."""
    out = None
    start = time.perf_counter()
    for _ in range(calls):
        out = program(state, *args)
        if donate:
            state = out[0] if isinstance(out, tuple) else out
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / calls, state


class Work:
    """A program of (state, *args) that does an operation `per_call` times.

    With `donate` it gives the new state, alone or before something else.
    """

    def __init__(self, fn, *args, calls, donate, per_call=1):
        self.program = jax.jit(fn, donate_argnums=0 if donate else ())
        self.args, self.calls, self.donate, self.per_call = args, calls, donate, per_call

    def best(self, make_state, rounds):
        state, times = make_state(), []
        for _ in range(rounds + 1):  # the first compiles
            took, state = seconds(self.program, state, *self.args, calls=self.calls, donate=self.donate)
            times.append(took / self.per_call)
        return min(times[1:])


def report(name, unit, ours, bare, aim=None):
    scale = {"us": 1e6, "ms": 1e3}[unit]
    row = {"operation": name, "unit": unit, "ours": round(ours * scale, 2), "bare": round(bare * scale, 2)}
    row["ratio"] = round(ours / bare, 2)
    if aim is not None:
        row |= {"ceiling": aim, "within_1.5": ours * scale <= 1.5 * aim or ours <= 1.5 * bare}
    print(json.dumps(row), flush=True)


def bare_add(state, obs, action, reward, terminated, truncated):
    """A write per array, and nothing else."""
    head = state["count"] % state["reward"].shape[0]
    rows = {"obs": obs, "action": action, "reward": reward, "terminated": terminated, "truncated": truncated}
    put = lambda x, row: jax.lax.dynamic_update_slice_in_dim(x, row[None], head, 0)
    return {"count": state["count"] + 1, **{name: put(state[name], row) for name, row in rows.items()}}


def bare_state(obs, slots):
    zeros = lambda shape, dtype: jnp.zeros((slots, B, *shape), dtype)
    flags = {name: zeros((), bool) for name in ("terminated", "truncated")}
    base = {"obs": zeros(obs.shape, obs.dtype), "action": zeros((), jnp.int32), "reward": zeros((), jnp.float32)}
    return {"count": jnp.zeros((), jnp.int32), **base, **flags}


def frames(rounds):
    """A ring of 1 GB of Atari frames: adding 8 of them, sampling 256 stacks of 4 with their successors."""
    stacked, frame, slots = struct((4, 84, 84), "uint8"), struct((84, 84), "uint8"), FRAMES // B
    buffer = ring.make(
        stacked,
        struct((), "int32"),
        capacity=FRAMES,
        num_envs=B,
        batch_size=N,
        gamma=0.99,
        frame_stack=ring.FrameStack(4),
    )
    one, many = rollout(stacked), rollout(stacked, count=64)
    row = lambda r: (
        r.obs[..., 0, :, 3, :, :],
        r.action[..., 0, :],
        r.reward[..., 0, :],
        r.mask[..., 0, :],
        r.mask[..., 0, :],
    )
    each = lambda add: lambda state, rows: jax.lax.scan(lambda s, x: (add(s, x), None), state, rows)[0]
    bare = lambda: bare_state(frame, slots)

    work = lambda fn, *args, **options: Work(fn, *args, donate=True, **options)
    ours = work(buffer.add, one, calls=300).best(buffer.init, rounds)
    least = work(bare_add, *jax.block_until_ready(jax.tree.map(jnp.copy, row(one))), calls=300).best(bare, rounds)
    report("add 8 frames, call", "us", ours, least, 11)
    ours = work(each(buffer.add), many, calls=10, per_call=64).best(buffer.init, rounds)
    # the bare program is given whole rollouts, too, and takes the newest frame of the stacks
    inside = each(lambda state, r: bare_add(state, *row(r)))
    least = work(inside, many, calls=10, per_call=64).best(bare, rounds)
    report("add 8 frames, inside", "us", ours, least, 11)

    full = rollout(stacked, steps=4)
    fill = jax.jit(lambda s: jax.lax.fori_loop(0, slots // 4, lambda i, s: buffer.add(s, full), s), donate_argnums=0)
    slot, column = (jnp.asarray(np.random.default_rng(1).integers(4, high - 1, N)) for high in (slots, B))

    def gather(state, slot, column):
        index = slot[:, None] - jnp.arange(3, -1, -1)[None]
        return state.obs[index, column[:, None]], state.obs[index + 1, column[:, None]]

    def half(state, slot, column):
        return gather(state, slot, column)[0]

    key = jax.random.key(0)
    state = fill(buffer.init())
    work = lambda fn, *args: Work(fn, *args, donate=False, calls=20).best(lambda: state, rounds)
    ours = work(lambda s, key: buffer.sample(s, key), key)
    report("sample 256 stacks and their successors", "ms", ours, work(gather, slot, column), 2 * 2.6)
    only = work(lambda s, key: buffer.sample(s, key).obs, key)
    report("sample 256 stacks", "ms", only, work(half, slot, column), 2.6)


def priorities(rounds):
    """2**20 rows of small observations: a prioritised sample of 256, and new priorities for it."""
    obs = struct((4,), "float32")
    buffer = prioritized.make(
        obs,
        struct((), "int32"),
        capacity=LEAVES,
        num_envs=B,
        batch_size=N,
        gamma=0.99,
        alpha=0.6,
        beta=0.4,
    )
    full, one = rollout(obs, steps=LEAVES // B // 2), rollout(obs)
    add = jax.jit(buffer.add, donate_argnums=0)
    index = jnp.asarray(np.random.default_rng(0).integers(0, LEAVES // 2, N).astype(np.int32))
    priority, key = jnp.linspace(0.1, 2.0, N), jax.random.key(0)
    uniform = jnp.linspace(0.0, 0.999, N)

    def times(fn, count=100):
        """`fn` (state, i) -> (state, number), `count` times in one program."""
        step = lambda i, carry: (lambda s, x: (s, carry[1] + x))(*fn(carry[0], i))
        return lambda state: jax.lax.fori_loop(0, count, step, (state, 0.0))

    def sample(state, i):
        batch = buffer.sample(state, jax.random.fold_in(key, i))
        return state, sum(x.astype(jnp.float32).sum() for x in jax.tree.leaves(batch))

    def find(state, i):
        tree = state.priorities.tree
        return state, sum_tree.find(tree, (uniform + i * 1e-6) * sum_tree.total(tree))[1].sum()

    def both(state, i):
        batch = buffer.sample(state, jax.random.fold_in(key, i))
        value = jnp.abs(batch.reward - batch.obs[:, 0])
        return buffer.set_priority(state, batch.index, value), batch.weight.sum()

    def whole():
        return add(buffer.init(), full)

    def tree_update(state, i):
        tree = sum_tree.update(state.priorities.tree, index ^ i, priority)
        return state.replace(priorities=state.priorities.replace(tree=tree)), 0.0

    set_priority = lambda state, i: (buffer.set_priority(state, index ^ i, priority), 0.0)
    call = lambda fn, *args: Work(fn, *args, donate=False, calls=300).best(whole, rounds)
    tree_only = lambda s, u: sum_tree.find(s.priorities.tree, u * sum_tree.total(s.priorities.tree))
    report("prioritised sample of 256, call", "us", call(buffer.sample, key), call(tree_only, uniform), 50)
    inside = lambda fn: Work(times(fn), calls=3, donate=True, per_call=100).best(whole, rounds)
    report("prioritised sample of 256, inside", "us", inside(sample), inside(find), 50)
    report("set 256 priorities, inside", "us", inside(set_priority), inside(tree_update), 310)
    report("sample 256 and set their priorities, inside", "us", inside(both), inside(find) + inside(tree_update), 360)
    entered = Work(lambda s, r: buffer.add(s, r), one, calls=300, donate=True).best(whole, rounds)
    rows = Work(
        lambda s, r: bare_add(s, r.obs[0], r.action[0], r.reward[0], r.mask[0], r.mask[0]), one, calls=300, donate=True
    )
    report("add 8 rows with priorities, call", "us", entered, rows.best(lambda: bare_state(obs, LEAVES // B), rounds))


WORKS = {"frames": frames, "priorities": priorities}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--only", choices=WORKS)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    for name, work in WORKS.items():
        if args.only in (None, name):
            work(args.rounds)


if __name__ == "__main__":
    main()
