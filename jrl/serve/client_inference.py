"""Local inference of clients: the policy as a program for numpy, and its weights by version."""

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
from jrl.export.traced_program import TracedProgram, trace
from jrl.serve import space_values
from jrl.serve.bodies import MAX_STEPS
from jrl.serve.inference import Inference, Weights
from jrl.serve.wire import RequestError
from jrl.types import ActOut, Box, EnvSpec, PyTree, Tuple, element

DEFAULT_ROWS = 64  # steps of an episode in one request, unless rollouts are shorter
_MEMORY_BYTES = 2**22  # approximate size of the memories in one request
_FIX = "let the server act (inference_mode: remote)"


class ClientInference:
    """A policy for clients that act with numpy; see `PolicyClient` with inference_mode "local".

    A thread builds the program at a client's first request, so that no other request waits for it.

    Args:
      name: algorithm, for errors.
      choice: `Algo.choice`, or `build_best_choice`; None: the algorithm has no probabilities.
      memory: memory of the policy and its exploration before an episode, [1, ...]; exploration with memory is refused.
      spec: spaces of the environment.
      to_env: function from the policy's actions to the environment's; None: the same actions.
      explore: whether actions are drawn; otherwise the best actions are chosen.
      clips: whether drawn actions of a Box are clipped to it, as for noise on actions.
      random_steps: number of random actions at the start of the run.
      rows: maximum number of steps of an episode in one request.
    """

    def __init__(
        self, name: str, choice: Callable[..., tuple[Any, PyTree]] | None, memory: PyTree, spec: EnvSpec,
        to_env: Callable[[PyTree], PyTree] | None, *, explore: bool, clips: bool = False, random_steps: int = 0,
        rows: int = DEFAULT_ROWS,
    ):  # fmt: skip
        self._name, self._choice, self._spec = name, choice, spec
        leaves, self._structure = jax.tree.flatten(memory)
        self._start = [np.asarray(x[0]) for x in jax.device_get(leaves)]
        self._memory = Tuple(tuple(Box(x.shape, x.dtype.name) for x in self._start))
        self._exploration_has_memory = explore and bool(jax.tree.leaves(split_carry(memory)[1]))
        self._to_env, self._explore, self._clips, self._random_steps = to_env, explore, clips, random_steps
        self._rows = rows
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "jrl-weights")
        self._listing: dict[str, Any] | None = None
        self._constants: dict[str, np.ndarray] = {}
        self._compute: Callable[[PyTree], list[np.ndarray]]  # weights -> constants of the program
        self._file: tuple[int, bytes] = -1, b""

    def request(self, inference: Inference) -> concurrent.futures.Future[tuple[dict[str, Any], int, bytes]]:
        """Returns the future (program, version, weights as npz). The future raises RequestError: numpy cannot act."""

        def build() -> tuple[dict[str, Any], int, bytes]:
            weights = inference.weights
            if self._listing is None:
                self._listing = self._build_listing(weights)
            if self._file[0] != weights.version:
                self._file = weights.version, self._pack_weights(weights, self._listing["program"]["inputs"])
            return self._listing, *self._file

        return self._thread.submit(build)

    def parse_memory(self, memory: Any, lead: tuple[int, ...]) -> PyTree:
        """Returns the memory before steps [*lead, *] from a request; None: a policy without memory.

        Raises RequestError: missing, unexpected or invalid memory.
        """
        if not self._start:
            if memory is not None:
                raise RequestError(422, "memory: this policy has no memory: leave it out")
            return None
        if memory is None:
            raise RequestError(400, "memory is missing: this policy has memory: send the memory before each step")
        return jax.tree.unflatten(self._structure, space_values.parse_value(self._memory, memory, "memory", lead))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _build_listing(self, weights: Weights) -> dict[str, Any]:
        """Returns the program as JSON. Raises RequestError: numpy cannot act for this policy."""
        if self._choice is None or self._exploration_has_memory:
            why = "the policy has no probabilities" if self._choice is None else "algo.exploration has memory"
            raise RequestError(422, f"{self._name}: {why}, so that clients cannot act: {_FIX}")
        if self._explore and self._random_steps:
            raise RequestError(
                422, f"algo.exploration.random_timesteps: a client cannot count them: set it to 0, or {_FIX}"
            )
        choice, dist = self._choice, None
        actor = jax.device_get(weights.actor)

        def outputs(weights: PyTree, inputs: PyTree, none: PyTree, reward: Any, begins: Any) -> Any:
            nonlocal dist
            obs, memory = inputs
            dist, after = choice(weights, obs, jax.tree.unflatten(self._structure, memory), self._explore)
            return [*(_list_parameters(part) for part in _list_parts(dist)), *jax.tree.leaves(after)], none

        no_memory = lambda num: ()
        try:
            # the program's memory includes that of a value network, because the learner starts with it
            program = trace(outputs, Tuple((self._spec.observation, self._memory)), no_memory, (actor,))
            rest, sent, self._compute = _split(program)
            listing, _ = npz.list_operations(
                rest._replace(constants=dict(zip(sent, self._compute(actor), strict=True)))
            )
            to_env = None
            if self._to_env is not None:
                convert = self._to_env
                conversion = trace(lambda x, memory, *rest: (convert(x), memory), self._spec.action, no_memory)
                to_env, constants = npz.list_operations(conversion)
                self._constants |= {f"to_env/{number}": x for number, x in constants.items()}
        except InputError as e:
            raise RequestError(422, f"{self._name}: numpy cannot act for this policy ({e}): {_FIX}") from None
        observation = []
        for path, leaf in spaces.leaves(self._spec.observation):
            x = element(leaf)
            observation.append((path, np.dtype(x.dtype).name, list(x.shape)))
        leaves = spaces.leaves(self._spec.action)
        actions = [
            self._describe_action(path, leaf, part)
            for (path, leaf), part in zip(leaves, _list_parts(dist), strict=True)
        ]
        self._constants |= {f"memory/{i}": x for i, x in enumerate(self._start)}
        most = min(MAX_STEPS, _MEMORY_BYTES // max(1, sum(x.nbytes for x in self._start)))
        sizes = {"version": 1, "rows": self._rows, "most": max(1, most)}
        return {**sizes, "observation": observation, "actions": actions, "program": listing, "to_env": to_env}

    def _describe_action(self, path: str, leaf: Any, part: Any) -> dict[str, Any]:
        """Returns how a client draws one array of the action."""
        kind = type(part).__name__ if is_distribution(part) else "Best"
        fields: dict[str, Any] = {"path": path, "kind": kind, "dtype": np.dtype(leaf.dtype).name}
        if kind == "MultiCategorical":
            fields["sizes"] = list(leaf.nvec)
        if self._clips and isinstance(leaf, Box):
            fields["low"], fields["high"] = (np.asarray(bound).tolist() for bound in leaf.bounds())
        return fields

    def _pack_weights(self, weights: Weights, first: int) -> bytes:
        values = self._compute(jax.device_get(weights.actor))
        arrays = {f"policy/{i}": npz.to_numpy_dtype(x) for i, x in enumerate(values, first)}
        buffer = io.BytesIO()
        every: dict[str, Any] = {"version": np.int64(weights.version), **self._constants, **arrays}
        np.savez(buffer, allow_pickle=False, **every)
        return buffer.getvalue()


def _split(program: TracedProgram) -> tuple[TracedProgram, list[int], Callable[[PyTree], list[np.ndarray]]]:
    """Returns (program without operations on weights alone, its constants' numbers, function weights -> constants)."""
    known = {*program.constants}
    here, rest = [], []  # the server computes schedules and the like, which numpy may lack
    for op in program.operations:
        sizes = (size for i in op.outputs for size in program.types[i].shape)
        if known.issuperset(op.inputs) and not any(map(export.is_symbolic_dim, sizes)):
            here.append(op)
            known.update(op.outputs)
        else:
            rest.append(op)
    needed = {*program.outputs, *(i for op in rest for i in op.inputs)}
    sent = [i for i in program.types if i in known and i in needed]
    own = program._replace(inputs=(), outputs=tuple(sent), operations=tuple(here))

    def compute(actor: PyTree) -> list[np.ndarray]:
        leaves = jax.tree.leaves(actor)
        weights = {number: np.asarray(leaves[i]) for number, i in program.weights}
        return [np.asarray(x) for x in own._replace(constants=program.constants | weights)()]

    return program._replace(operations=tuple(rest)), sent, compute


def build_best_choice(act: Callable[..., ActOut]) -> Callable[..., tuple[PyTree, PyTree]]:
    """Returns a `choice` of a policy's best actions: `act` without exploration."""

    def choose(actor: PyTree, obs: PyTree, memory: PyTree, explore: bool) -> tuple[PyTree, PyTree]:
        out = act(actor, obs, memory, jax.random.key(0), False)
        return out.action, out.carry

    return choose


def _list_parts(dist: Any) -> list[Any]:
    return jax.tree.leaves(getattr(dist, "parts", dist), is_leaf=is_distribution)


def _list_parameters(part: Any) -> list[jax.Array]:
    """Returns the parameters of a distribution, [N, *] f32, or the action itself if `part` is not a distribution."""
    if not is_distribution(part):
        return [part]
    if isinstance(part, Categorical | MultiCategorical | Bernoulli):
        return [part.logits]
    gaussian: DiagGaussian = batched(part)
    return [gaussian.mean, jnp.asarray(gaussian.log_std)]
