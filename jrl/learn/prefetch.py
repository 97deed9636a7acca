"""Learning from data sets that exceed the devices' memory: the host keeps them and fetches batches ahead."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jrl.learn import parallel
from jrl.learn.offline import Offline, keys_of, repeat_updates
from jrl.learn.program import LoopState
from jrl.types import Key, PyTree

_UPDATES = 32  # updates per prefetched block; the devices hold the batches of two blocks


class Prefetched(Offline):
    """Offline's updates, bit for bit, on batches that are drawn ahead, and therefore without priorities.

    The host draws the batches of the next `_UPDATES` updates while the devices learn from the present ones. Held-out
    data are on the devices.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._host = jax.local_devices(backend="cpu")[0]
        # (seed, first update), and the batches from that update on
        self._drawn: tuple[tuple[int, int], PyTree] | None = None
        self._draw = jax.jit(self._sampled, static_argnums=2)
        self._draw_one = jax.jit(self._of_devices)
        batches, same = PartitionSpec(None, parallel.AXIS), parallel.REPLICATED
        self._sharding = jax.sharding.NamedSharding(self.mesh, batches)
        self._learn = parallel.pmap(
            self._on_batches, self.mesh, (same, batches, same, same, same), (same, same), (0,), loops=True
        )
        self._validate = parallel.pmap(self._held_out_metrics, self.mesh, (same, parallel.PER_DEVICE, same, same), same)

    def _filled(self) -> PyTree:
        with jax.default_device(self._host):
            full = jax.device_put(self._data.fill(), self._host)
            like = jax.eval_shape(self._data.buffer.init)
            part = lambda d: jax.tree.map(lambda x, own: x.reshape(self._devices, *own.shape)[d], full, like)
            return [part(d) for d in range(self._devices)]

    def _initial_changing(self) -> PyTree:
        return ()

    def _sampled(self, rows: list[PyTree], root: Key, count: int, first: Any) -> PyTree:
        """Draws the batches of `count` updates from number `first` on, of all devices: [count, N, *]."""

        return jax.lax.map(lambda key: self._of_devices(rows, key), keys_of(root, first, count).draw)

    def _of_devices(self, rows: list[PyTree], key: Key) -> PyTree:
        own = [self._data.buffer.sample(part, jax.random.fold_in(key, d)) for d, part in enumerate(rows)]
        return jax.tree.map(lambda *x: jnp.concatenate(x), *own)

    def sampled(self, state: LoopState, key: Key) -> PyTree:
        with jax.default_device(self._host):
            return self._draw_one(self._rows, key)

    def _on_batches(self, learned: PyTree, batches: PyTree, root: Key, first: Any, count: Any):
        """Makes the first `count` updates on batches [K, N, *]; returns the sums of their metrics."""
        keys = keys_of(root, first, _UPDATES).update

        def update(learned: PyTree, i: Any):
            assert self.learner.update is not None
            learned, aux = self.learner.update(learned, jax.tree.map(lambda x: x[i], batches), keys[i])
            return learned, aux.metrics

        return repeat_updates(update, learned, count)

    def _held_out_metrics(self, learned: PyTree, held_out_rows: PyTree, root: Key, iteration: Any):
        assert self._held_out is not None
        return self._validated(self._held_out, learned, held_out_rows, root, iteration)

    def _fetch(self, root: Key, first: int) -> PyTree:
        with jax.default_device(self._host):
            return jax.device_put(self._draw(self._rows, root, _UPDATES, np.uint32(first)), self._sharding)

    def advance(self, state: LoopState, seed: int, iteration: int, count: int = 1):
        root, learned, total = self._roots[seed], state.learner, None
        for first in range(iteration, iteration + count, _UPDATES):
            updates = min(_UPDATES, iteration + count - first)
            is_fetched = self._drawn is not None and self._drawn[0] == (seed, first)
            batches = self._drawn[1] if is_fetched and self._drawn else self._fetch(root, first)
            self._drawn = (seed, first + updates), self._fetch(root, first + updates)
            learned, sums = self._learn(learned, batches, root, np.uint32(first), np.uint32(updates))
            total = sums if total is None else jax.tree.map(jnp.add, total, sums)
        assert total is not None
        metrics = {name: x / count for name, x in total.items()}
        if self._held_out is not None:
            metrics |= self._validate(learned, self._held_out_rows, root, np.uint32(iteration))
        return LoopState(learned, (), ()), self._counted(metrics, iteration + count), self._report(count)
