"""A made-up world whose observations are all different, and a replay kept as Python lists of its rows."""

import collections

import jax
import jax.numpy as jnp
import numpy as np

from jrl.types import Rollout

NONSENSE = 1e6  # stands on reset rows


def struct(shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


class World:
    """B columns of episodes with random ends. Observations are dicts: a vector, and a stack of S frames (S > 1)."""

    def __init__(self, num_envs, seed, stack=1, axis=0, ends=0.25):
        self.B, self.S, self.axis, self.ends = num_envs, stack, axis, ends
        self.rng = np.random.default_rng(seed)
        self.count = 0
        self.frames = [None] * num_envs
        self.ended = [False] * num_envs
        self.obs = {"place": struct((2,))}
        if stack > 1:
            self.obs["image"] = struct((stack, 3, 2) if axis == 0 else (3, 2, stack), "int32")
        self.action = {"move": struct((), "int32"), "force": struct((2,))}
        for b in range(num_envs):
            self._begin(b)

    def _frame(self):
        self.count += 1
        return self.count

    def _begin(self, b):
        self.frames[b] = collections.deque([self._frame()] * self.S, self.S)
        self.ended[b] = False

    def _observe(self, b):
        newest = self.frames[b][-1]
        obs = {"place": np.array([newest, -newest], np.float32)}
        if self.S > 1:
            image = np.array(self.frames[b], np.int32)[:, None, None] * 10 + np.arange(6, dtype=np.int32).reshape(3, 2)
            obs["image"] = image if self.axis == 0 else np.moveaxis(image, 0, -1)
        return obs

    def rollout(self, steps, restart=(), count=None):
        """The next `steps` rows; the columns in `restart` begin anew, as after a crash of their environments. Those
        that have a lower `count` get so many rows, and behind them padding, as from environments out of step."""
        for b in restart:
            self._begin(b)
        count = np.full(self.B, steps, np.int32) if count is None else np.asarray(count, np.int32)
        columns = [[self._step(b) for _ in range(n)] + [self._padding(b)] * (steps - n) for b, n in enumerate(count)]
        for column, n in zip(columns, count):
            if 0 < n < steps and column[n - 1]["mask"] and not column[n - 1]["terminated"]:
                column[n - 1]["truncated"] = np.True_  # as `unroll.finish` has it
        rows = list(zip(*columns))
        stack = lambda trees: jax.tree.map(lambda *x: np.stack(x), *trees)
        rows = stack([stack(row) for row in rows])
        last = stack([self._observe(b) for b in range(self.B)])
        contiguous = np.array([b not in restart for b in range(self.B)])
        return Rollout(last_obs=last, contiguous=contiguous, carry=(), count=count, **rows)

    def _padding(self, b):
        row = {"obs": self._observe(b), "reward": np.float32(NONSENSE), "mask": np.False_}
        row |= {"action": {"move": np.int32(-1), "force": np.zeros(2, np.float32)}}
        row |= {"terminated": np.False_, "truncated": np.False_}
        return row | {"extras": {"carry": np.zeros(3, np.float32), "value": np.float32(-1)}}

    def _step(self, b):
        reset, obs = self.ended[b], self._observe(b)
        ends = not reset and self.rng.random() < self.ends
        kind = self.rng.integers(3)  # both flags at once, too
        row = {
            "obs": obs,
            "action": {"move": np.int32(self._frame()), "force": np.full(2, self._frame(), np.float32)},
            "reward": np.float32(NONSENSE if reset else self.rng.normal()),
            "terminated": np.bool_(ends and kind != 1),
            "truncated": np.bool_(ends and kind != 0),
            "mask": np.bool_(not reset),
            "extras": {"carry": np.full(3, self._frame(), np.float32), "value": np.float32(self._frame())},
        }
        if reset:
            self._begin(b)
        else:
            self.frames[b].append(self._frame())
            self.ended[b] = ends
        return row


class Oracle:
    """All slots of a ring, a list per column of what was written to them; each row a dict with its `next_obs`.

    Columns that do not continue begin behind a void row with the observation that came last, `stack` - 1 further rows
    for frames in between. Columns in step all do what one of them does.
    """

    def __init__(self, num_envs, stack=1, in_step=True):
        self.columns = [[] for _ in range(num_envs)]
        self.stack, self.in_step = stack, in_step

    def add(self, rollout):
        steps = rollout.reward.shape[0]
        take = lambda tree, *i: jax.tree.map(lambda x: x[i], tree)
        for b, rows in enumerate(self.columns):
            count = steps if rollout.count is None or self.in_step else int(rollout.count[b])
            if not count:
                continue
            if not (rollout.contiguous.all() if self.in_step else rollout.contiguous[b]):
                if rows:
                    rows.append({**rows[-1], "obs": rows[-1]["next_obs"], "mask": False, "seam": True})
                rows += [{"mask": False, "seam": True, "frames": True}] * (self.stack - 1)
            for t in range(count):
                row = {
                    name: take(getattr(rollout, name), t, b)
                    for name in ("obs", "action", "reward", "terminated", "truncated", "mask", "extras")
                }
                if t + 1 == count < steps:
                    row["truncated"] = False  # the next rollout goes on
                after = take(rollout.obs, t + 1, b) if t + 1 < steps else take(rollout.last_obs, b)
                rows.append({**row, "next_obs": after})

    def __len__(self):
        assert self.in_step
        return len(self.columns[0])

    def transition(self, column, t, steps, gamma):
        """reward, discount and next_obs of a window of at most `steps` rows, by a plain loop."""
        rows, total, discount = self.columns[column], 0.0, 1.0
        for i, row in enumerate(rows[t : t + steps]):
            if i > 0 and not row["mask"]:
                break  # behind a seam; what it would bootstrap from is the observation before
            last = row
            total, discount = total + discount * float(row["reward"]), discount * gamma
            if row["terminated"]:
                return total, 0.0, row["next_obs"]
            if row["truncated"]:
                break
        return total, discount, last["next_obs"]


def assert_trees_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def jitted(buffer):
    """The buffer's functions as programs; nothing is donated, so that a test can look back."""
    functions = {name: jax.jit(f) if callable(f) else f for name, f in buffer._asdict().items()}
    return type(buffer)(**functions)


def plain(T, start=0, num_envs=2, **fields):
    """A rollout without ends, whose observations [1] and rewards are the number of the step."""
    step = np.broadcast_to(np.arange(start, start + T + 1, dtype=np.float32)[:, None], (T + 1, num_envs))
    no = np.zeros((T, num_envs), bool)
    rollout = Rollout(
        obs=step[:-1, :, None],
        last_obs=step[-1, :, None],
        action=np.zeros((T, num_envs), np.int32),
        reward=step[:-1],
        terminated=no,
        truncated=no,
        mask=~no,
        contiguous=np.full((num_envs,), start > 0),
        extras={},
        carry=(),
    )
    return rollout.replace(**fields)
