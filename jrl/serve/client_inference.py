"""Clients that act by themselves: the policy as a program for numpy, and its weights by version."""

import concurrent.futures
import io
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from jrl import spaces
from jrl.algos.agent import split_carry
from jrl.distributions import Bernoulli, Categorical, DiagGaussian, MultiCategorical, batched, is_distribution
from jrl.errors import InputError
from jrl.export import npz
from jrl.export.program import Program, trace
from jrl.serve import space_values
from jrl.serve.bodies import STEPS
from jrl.serve.inference import Inference, Weights
from jrl.serve.wire import Refused
from jrl.types import ActOut, Box, EnvSpec, PyTree, Tuple, element

ROWS = 64  # of an episode that clients send at once, where no rollout asks for fewer
_MEMORY = 2**22  # bytes of what is remembered in one request, about
_FIX = "let the server act (inference_mode: remote)"


class ClientInference:
    """A policy for clients that act with numpy; see `PolicyClient` with inference_mode "local".

    Its program is made when a client first asks, in a thread of its own: no other request waits for it.

    Args:
      name: algorithm, for errors.
      choice: `Algo.choice` or `best_actions`; None: the algorithm has no probabilities.
      memory: of the policy and its exploration before an episode, [1, ...]; such exploration is refused.
      spec, to_env: spaces, and the policy's actions as the environment's; None: they are the same.
      explore: whether actions are drawn; else the best ones are taken.
      clips: whether drawn actions of a Box are clipped to it, as noise on actions is.
      random_steps: at the start of the run, with actions that no policy chooses.
      rows: of an episode that clients send at once, at most: those that the learner takes.
    """

    def __init__(
        self, name: str, choice: Callable[..., tuple[Any, PyTree]] | None, memory: PyTree, spec: EnvSpec,
        to_env: Callable[[PyTree], PyTree] | None, *, explore: bool, clips: bool, random_steps: int, rows: int,
    ):  # fmt: skip
        self._name, self._choice, self._spec = name, choice, spec
        leaves, self._structure = jax.tree.flatten(memory)
        self._start = [np.asarray(x[0]) for x in jax.device_get(leaves)]
        self._memory = Tuple(tuple(Box(x.shape, x.dtype.name) for x in self._start))
        self._strange = explore and bool(jax.tree.leaves(split_carry(memory)[1]))
        self._to_env, self._explore, self._clips, self._random_steps = to_env, explore, clips, random_steps
        self._rows = rows
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "jrl-weights")
        self._listing: dict[str, Any] | None = None
        self._constants: dict[str, np.ndarray] = {}
        self._program: Program | None = None  # its constants and operations are those of weights alone
        self._sent: list[int] = []  # its values that clients get
        self._first = 0  # number of the first of them, for the client
        self._file: tuple[int, bytes] = -1, b""

    def get(self, inference: Inference) -> concurrent.futures.Future[tuple[dict[str, Any], int, bytes]]:
        """Makes (program, version, weights as npz) in another thread. Raises Refused: numpy cannot act."""

        def make() -> tuple[dict[str, Any], int, bytes]:
            weights = inference.weights
            if self._listing is None:
                self._listing = self._made(weights)
            if self._file[0] != weights.version:
                self._file = weights.version, self._packed(weights)
            return self._listing, *self._file

        return self._thread.submit(make)

    def memory(self, given: Any, lead: tuple[int, ...]) -> PyTree:
        """Returns the memory before steps [*lead, ...] that a client sends; None without. Raises Refused."""
        if not self._start:
            if given is not None:
                raise Refused(422, "memory: this policy remembers nothing")
            return None
        if given is None:
            raise Refused(400, "memory is missing: this policy remembers, and it is learned from what it remembered")
        return jax.tree.unflatten(self._structure, space_values.read(self._memory, given, "memory", lead))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _made(self, weights: Weights) -> dict[str, Any]:
        """Returns the program as JSON. Raises Refused: numpy cannot act for this policy."""
        if self._choice is None or self._strange:
            why = "the policy has no probabilities" if self._choice is None else "algo.exploration remembers"
            raise Refused(422, f"{self._name}: {why}, so that no client can act for it: {_FIX}")
        if self._explore and self._random_steps:
            raise Refused(422, f"algo.exploration.random_timesteps: a client cannot count them: set it to 0, or {_FIX}")
        choice, dist = self._choice, None
        actor = jax.device_get(weights.actor)

        def outputs(weights: PyTree, inputs: PyTree, none: PyTree, reward: Any, begins: Any) -> Any:
            nonlocal dist
            obs, memory = inputs
            dist, after = choice(weights, obs, jax.tree.unflatten(self._structure, memory), self._explore)
            return [*(_numbers(part) for part in _parts(dist)), *jax.tree.leaves(after)], none

        no_memory = lambda num: ()
        try:
            # all of the memory goes in and out, that of a value function's own network, too: the learner begins with it
            program = trace(outputs, Tuple((self._spec.observation, self._memory)), no_memory, (actor,))
            rest = self._split(program)
            listing, _ = npz.listed(rest._replace(constants=self._values(actor)))
            self._first = len(rest.inputs)
            to_env = None
            if self._to_env is not None:
                change = self._to_env
                made = trace(lambda x, memory, *rest: (change(x), memory), self._spec.action, no_memory)
                to_env, own = npz.listed(made)
                self._constants |= {f"to_env/{number}": x for number, x in own.items()}
        except InputError as e:
            raise Refused(422, f"{self._name}: numpy cannot act for this policy ({e}): {_FIX}") from None
        observation = [(path, *_array(leaf)) for path, leaf in spaces.leaves(self._spec.observation)]
        taken = spaces.leaves(self._spec.action)
        parts = [self._part(path, leaf, part) for (path, leaf), part in zip(taken, _parts(dist), strict=True)]
        self._constants |= {f"memory/{i}": x for i, x in enumerate(self._start)}
        most = min(STEPS, _MEMORY // max(1, sum(x.nbytes for x in self._start)))
        sizes = {"version": 1, "rows": self._rows, "most": max(1, most)}
        return {**sizes, "observation": observation, "actions": parts, "program": listing, "to_env": to_env}

    def _part(self, path: str, leaf: Any, part: Any) -> dict[str, Any]:
        """Describes how one array of the action is drawn."""
        kind = type(part).__name__ if is_distribution(part) else "Best"
        found: dict[str, Any] = {"path": path, "kind": kind, "dtype": np.dtype(leaf.dtype).name}
        if kind == "MultiCategorical":
            found["sizes"] = list(leaf.nvec)
        if self._clips and isinstance(leaf, Box):
            found["low"], found["high"] = (np.asarray(bound).tolist() for bound in leaf.bounds())
        return found

    def _split(self, program: Program) -> Program:
        """Returns a program without the part that depends on weights alone, such as schedules: it is computed here."""
        known = {*program.constants}
        here, rest = [], []
        for op in program.operations:
            sizes = (size for i in op.outputs for size in program.types[i].shape)
            if known.issuperset(op.inputs) and not any(map(export.is_symbolic_dim, sizes)):
                here.append(op)
                known.update(op.outputs)
            else:
                rest.append(op)
        needed = {*program.outputs, *(i for op in rest for i in op.inputs)}
        self._sent = [i for i in program.types if i in known and i in needed]
        self._program = program._replace(operations=tuple(here))
        return program._replace(operations=tuple(rest))

    def _values(self, actor: PyTree) -> dict[int, np.ndarray]:
        """Returns the arrays of an actor that clients get, by number."""
        program, leaves = self._program, jax.tree.leaves(actor)
        assert program is not None
        weights = {number: np.asarray(leaves[i]) for number, i in program.weights}
        values = program._replace(inputs=(), outputs=tuple(self._sent), constants=program.constants | weights)()
        return {i: np.asarray(x) for i, x in zip(self._sent, values, strict=True)}

    def _packed(self, weights: Weights) -> bytes:
        values = self._values(jax.device_get(weights.actor)).values()
        arrays = {f"policy/{i}": npz.plain(x) for i, x in enumerate(values, self._first)}
        buffer = io.BytesIO()
        every: dict[str, Any] = {"version": np.int64(weights.version), **self._constants, **arrays}
        np.savez(buffer, allow_pickle=False, **every)
        return buffer.getvalue()


def best_actions(act: Callable[..., ActOut]) -> Callable[..., tuple[PyTree, PyTree]]:
    """Makes a `choice` that takes a policy's best actions: `act` without exploration."""

    def choose(actor: PyTree, obs: PyTree, memory: PyTree, explore: bool) -> tuple[PyTree, PyTree]:
        out = act(actor, obs, memory, jax.random.key(0), False)
        return out.action, out.carry

    return choose


def _array(leaf: Any) -> tuple[str, list[int]]:
    found = element(leaf)
    return np.dtype(found.dtype).name, list(found.shape)


def _parts(dist: Any) -> list[Any]:
    return jax.tree.leaves(getattr(dist, "parts", dist), is_leaf=is_distribution)


def _numbers(part: Any) -> list[jax.Array]:
    """Returns the parameters of a distribution, [N, *] f32; an action that is no distribution itself."""
    if not is_distribution(part):
        return [part]
    if isinstance(part, Categorical | MultiCategorical | Bernoulli):
        return [part.logits]
    whole: DiagGaussian = batched(part)
    return [whole.mean, jnp.asarray(whole.log_std)]
