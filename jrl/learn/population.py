"""Population: runs that differ only in their seed and in floats, as one program.

The program is the fused iteration of one run (fused.py), vmapped over the members. Each device has some members. The
Program of a member is a view of its place in the common state.
"""

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jrl.host import machine
from jrl.learn import memory, parallel
from jrl.learn.fused import Fused
from jrl.learn.program import LoopState, Program
from jrl.types import Episodes, Key, Metrics, PyTree

_MEMBERS = "member"  # the axis of the mesh
_FEW = 4  # the part of a program's members that is few enough for a smaller program
_PATIENCE = 1.25  # until so many times the iterations at which they became few: they may end before it is compiled
_OWN, _SAME = P(_MEMBERS), P()
_ADVANCED = (_OWN, _OWN, _OWN, _SAME, _SAME)  # floats, state, roots, iteration, count
_NUMBERS = (jax.ShapeDtypeStruct((), np.uint32),) * 2


class Population:
    """The state of all members [S, ...], and the program that advances it.

    Args:
      fused: program of the first member, on one device, with pure environments.
      with_values: floats of one member, which may be traced -> its Fused.
      seeds: seeds of the members.
      floats: the floats in which members differ, [S] f32 each; () if there are none.
      devices: devices of the members, as far as there is a member for each.
    """

    def __init__(
        self,
        fused: Fused,
        with_values: Callable[[PyTree], Fused],
        *,
        seeds: Sequence[int],
        floats: PyTree,
        devices: Sequence[jax.Device],
    ):
        self.fused, self._of_floats = fused, with_values
        self._devices = devices
        self._roots = jnp.stack([jax.random.key(seed) for seed in seeds])
        self._floats = jax.tree.map(jnp.asarray, floats)
        self._begun = jax.jit(lambda floats, root: with_values(floats).init_state(root))  # a member's state
        self._start: Callable[..., LoopState] = self._begun
        self._places = {i: i for i in range(len(seeds))}  # member -> place
        self._state: LoopState | None = None
        self._deal()

    def _deal(self) -> None:
        """Makes the programs that advance the present members."""
        self._compiled: jax.stages.Compiled | None = None
        # the second axis is the one device of a member's learner, over which its collectives are
        self._mesh = Mesh(np.asarray(self._devices[: len(self._places)]).reshape(-1, 1), (_MEMBERS, parallel.AXIS))
        alone = len(self._places) <= self._mesh.devices.size
        body = _of_one(self._one) if alone else jax.vmap(self._one, in_axes=(0, 0, 0, None, None))
        loops = self.fused.learner.sample is not None
        self._advance = parallel.pmap(body, self._mesh, _ADVANCED, _OWN, donate_argnums=(1,), loops=loops)
        self._writing = parallel.pmap(_written, self._mesh, (_OWN, _SAME, _SAME), _OWN, donate_argnums=(0,))

    # ------------------------------------------------------------ beginning

    def memory(self) -> int | None:
        """Compiles the program; returns the bytes of a member on its device, None if the backend does not report them.

        The state counts twice: a copy is held of members that wait for others.
        """
        floats, root = jax.eval_shape(lambda: self._own(0))
        state = jax.eval_shape(self._begun, floats, root)
        width = self._width(len(self._places))
        every = jax.tree.map(lambda x: jax.ShapeDtypeStruct((width, *x.shape), x.dtype), (floats, state, root))
        shapes = parallel.with_shardings((*every, *_NUMBERS), self._mesh, _ADVANCED)
        lowered = self._advance.lower(*shapes)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            compiled = pool.submit(lowered.compile)
            self._start = self._begun.lower(floats, root).compile()  # meanwhile
        self._compiled = compiled.result()
        if (found := self._compiled.memory_analysis()) is None:
            return None
        taken = found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes
        return taken * self._mesh.devices.size // width

    def fits(self) -> int | None:
        """Returns the number of members that fit the free memory; None: unknown."""
        device, count = self._devices[0], len(self._devices)
        free, of_one = memory.available(device), self.memory()
        if free is None or of_one is None:
            return None
        shared = count if device.platform == "cpu" else 1  # CPU devices share the host's memory
        return count * int(machine.SHARE * free / shared / max(of_one, 1))

    def begin(self) -> None:
        """Makes each member's state, one after the other: a vmapped orthogonal init hangs on jaxlib 0.10 on CPU."""
        if self._state is not None:
            return
        width = self._width(len(self._places))
        repeat = lambda tree: jax.tree.map(lambda x: jnp.broadcast_to(x[None], (width, *x.shape)), tree)
        data = self.fused.learner.data
        filled = data.fill() if data else None  # all members begin with the same data sets in replay

        def begun(member: int) -> LoopState:
            state = self._start(*self._own(member))
            return dataclasses.replace(state, replay=filled) if data else state

        first, *others = self._places
        self._state = jax.jit(repeat, out_shardings=NamedSharding(self._mesh, _OWN))(begun(first))
        for i in others:
            self._write(i, begun(i))

    def _width(self, members: int) -> int:
        """Returns the number of places, a multiple of the number of devices."""
        devices = self._mesh.devices.size
        return -(-members // devices) * devices

    def _own(self, member: int) -> tuple[PyTree, Key]:
        return jax.tree.map(lambda x: x[member], self._floats), self._roots[member]

    # ------------------------------------------------------------ one member's state

    def of(self, member: int) -> LoopState:
        """Returns a copy of a member's state."""
        devices = self._mesh.devices.flat
        device, place = divmod(self._places[member], self._state_width // len(devices))
        own = jax.tree.map(lambda x: x.addressable_shards[device].data, self._state)
        return jax.device_put(_taken(own, place), devices[0])

    def put(self, member: int, state: LoopState) -> None:
        """Replaces a member's state."""
        self._write(self._places[member], state)

    def copy(self, source: int, target: int, numbers: PyTree) -> None:
        """Copies a member's state to another, whose `build_population.numbers` are `numbers` from now on."""
        self.put(target, self.of(source))
        values = dict(enumerate(jax.tree.leaves(numbers)))
        self._floats = {i: x.at[target].set(np.float32(values[i])) for i, x in self._floats.items()}

    def _write(self, place: int, one: LoopState) -> None:
        same = NamedSharding(self._mesh, _SAME)
        self._state = self._writing(self._state, jax.device_put(one, same), jax.device_put(np.int32(place), same))

    def keep_alone(self, members: Sequence[int]) -> None:
        """Goes on with some of the members, in a smaller program."""
        places = np.array([self._places[i] for i in members])
        self._places = {member: place for place, member in enumerate(members)}
        self._deal()
        places = np.resize(places, self._width(len(members)))  # repeats members up to the width
        taken = jax.jit(lambda tree: jax.tree.map(lambda x: x[places], tree))(self._state)
        self._state = jax.device_put(taken, NamedSharding(self._mesh, _OWN))

    def narrow(self, ended_at: Sequence[float], iteration: int) -> None:
        """Continues in a smaller program if few members have been left for many iterations.

        Only the ends decide, since the width of a program may affect the last bit: a resumed population has the same
        width.

        Args:
          ended_at: iteration at which each member ended; inf: it is running.
          iteration: iteration of the running members.
        """
        while True:
            ends = sorted(ended_at[number] for number in self.members)
            few = len(ends) // _FEW
            until = _PATIENCE * ends[len(ends) - few - 1]
            if not few or iteration < until:
                return
            self.keep_alone([number for number in self.members if ended_at[number] > until])

    def actor(self, member: int) -> PyTree:
        """Returns the actor of a member."""
        return parallel.first_copy(self._acting(self._own(member)[0], self.of(member).learner))

    @functools.cached_property
    def _acting(self) -> Callable[..., PyTree]:
        return jax.jit(lambda floats, learner: self._of_floats(floats).learner.actor(learner))

    # ------------------------------------------------------------ going on

    def advance(
        self, calls: Mapping[int, tuple[int, int]], *, hold: bool = False
    ) -> dict[int, tuple[Metrics, Episodes]]:
        """Advances members; returns metrics and episodes by member, on the host.

        Args:
          calls: member -> (iteration, count); one program advances members with equal calls.
          hold: whether to keep the states of other members, which are invalid afterwards otherwise.
        """
        found: dict[int, tuple[Metrics, Episodes]] = {}
        alike = list(dict.fromkeys(calls.values()))
        hold = hold or len(alike) > 1
        for call in alike:
            members = [member for member, own in calls.items() if own == call]
            before = _copied(self._state) if hold else None
            order = np.zeros(self._state_width, np.int32)
            order[[*self._places.values()]] = [*self._places]
            floats = jax.tree.map(lambda x, order=order: x[order], self._floats)
            advance = self._compiled or self._advance
            self._state, metrics, report = advance(floats, self._state, self._roots[order], *map(np.uint32, call))
            metrics, report = jax.device_get((metrics, report))
            for member in members:
                own = lambda x, place=self._places[member]: x[place]
                found[member] = jax.tree.map(own, metrics), jax.tree.map(own, report)
            if hold:
                mine = np.zeros(self._state_width, bool)
                mine[[self._places[member] for member in members]] = True
                self._state = _chosen(mine, self._state, before)
        return found

    @property
    def members(self) -> list[int]:
        """Members that are advanced."""
        return list(self._places)

    @property
    def _state_width(self) -> int:
        return jax.tree.leaves(self._state)[0].shape[0]

    def _one(self, floats: PyTree, state: LoopState, root: Key, iteration: Any, count: Any):
        return self._of_floats(floats).body(state, root, iteration, count)

    def close(self) -> None:
        self.fused.close()


def _of_one(body: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Maps `body` over the only member of a device, without vmap: the program is that of one run."""

    def over(floats: PyTree, state: LoopState, roots: Key, iteration: Any, count: Any):
        floats, state, root = jax.tree.map(lambda x: x[0], (floats, state, roots))
        return jax.tree.map(lambda x: x[None], body(floats, state, root, iteration, count))

    return over


def _written(tree: PyTree, one: PyTree, place: jax.Array) -> PyTree:
    """Replaces the member at `place`, if this device has it."""
    count = jax.tree.leaves(tree)[0].shape[0]
    mine = place - count * jax.lax.axis_index(_MEMBERS)
    mine = jnp.where((mine >= 0) & (mine < count), mine, count)  # beyond the end nothing is written
    return jax.tree.map(lambda x, new: x.at[mine].set(new, mode="drop"), tree, one)


_copied = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
_taken = jax.jit(lambda tree, place: jax.tree.map(lambda x: x[place], tree))


@functools.partial(jax.jit, donate_argnums=(1,))
def _chosen(mine: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    choose = lambda a, b: jnp.where(mine.reshape(-1, *[1] * (a.ndim - 1)), a, b)
    return jax.tree.map(choose, new, old)


class MemberPlace:
    """A member's state, read on demand, with the fields of a LoopState."""

    def __init__(self, population: Population, member: int):
        self._population, self._member = population, member

    learner = property(lambda self: self._population.of(self._member).learner)
    replay = property(lambda self: self._population.of(self._member).replay)
    source = property(lambda self: self._population.of(self._member).source)


class MemberProgram(Program):
    """A member of a population as a Program. To advance several members, call `Population.advance`."""

    def __init__(self, population: Population, member: int):
        fused = population.fused
        super().__init__(fused.learner, fused.mesh, rows=fused.rows)
        self.population, self.member, self.iterations = population, member, fused.iterations
        self.place_of = MemberPlace(population, member)

    def init(self, seed: int) -> Any:
        self.population.begin()
        return self.place_of

    def advance(self, state: Any, seed: int, iteration: int, count: int = 1) -> tuple[Any, Metrics, Episodes]:
        made = self.population.advance({self.member: (iteration, count)}, hold=True)
        return self.place_of, *made[self.member]

    def keep(self, state: Any) -> LoopState:
        return self.population.fused.keep(self.population.of(self.member))

    def place(self, state: LoopState) -> Any:
        self.population.put(self.member, self.population.fused.place(state))
        return self.place_of

    def assign(self, state: Any, kept: PyTree) -> Any:
        of_all = self.population.of(self.member)
        self.population.put(self.member, super().assign(of_all, kept))
        return self.place_of

    def actor(self, state: Any) -> PyTree:
        return self.population.actor(self.member)

    def discontinue(self, state: Any) -> Any:
        one = self.population.of(self.member)
        self.population.put(self.member, self.population.fused.discontinue(one))
        return self.place_of
