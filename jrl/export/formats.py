"""The three formats of an export, and the check that each acts as jrl does."""

import contextlib
import importlib.util
import json
import logging
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import export as jax_export

from jrl import spaces
from jrl.export import directory, npz
from jrl.export.program import Program, trace
from jrl.export.source import Source
from jrl.host.machine import version
from jrl.types import Box, Discrete, InputError, Leaf, MultiBinary, MultiDiscrete, PyTree, Space

PLATFORMS = ("cpu", "cuda", "tpu")
_STEPS = 8  # of policies with memory
_CHECKED = 256  # random observations on which an export is compared with jrl
_AGREEMENT = 0.9  # share of them that must give the same action: two actions may be equally good within rounding


def export(source: Source, *, format: str, out: Path) -> dict[str, Any]:
    """Writes `source` to the directory `out`.

    Args:
      source: the policy.
      format: one of FILES.
      out: made, or an earlier export that is replaced.
    Returns:
      What was written, and the share of random observations on which it acts as jrl does.
    Raises:
      InputError: the format cannot express the policy, `out` holds something else or cannot be written.
    """
    program = trace(source.step, source.observation, source.memory)
    # before any conversion: jax2onnx replaces functions of jax.numpy for the rest of the process
    steps = _random_steps(source, _STEPS if program.num_memory else 1)
    expected = _expected(source, steps)
    with _reported(format):
        files = {"policy.py": _own("policy.py"), **FILES[format](program)}
    about = {
        "kind": directory.KIND,
        "version": 2,
        "format": format,
        **source.about,
        "choices": source.choices,
        "memory": [{"shape": x.shape[1:], "dtype": x.dtype.name} for x in program.memory],
        "reads_reward": program.reads_reward,
        "reads_begins": program.reads_begins,
        "jrl": version("jrl"),
        "jax": jax.__version__,
        "files": sorted(files),
    }
    files[directory.ABOUT] = json.dumps(about, indent=1).encode()
    with _reported(format):
        agreement = _agreement(files, steps, expected)
    if agreement < _AGREEMENT:
        raise InputError(
            f"--format {format}: the exported policy gives jrl's action for {agreement:.0%} of random observations "
            "only: use another format, and please report this"
        )
    directory.write(out, files)
    kept: dict[str, Any] = {k: about[k] for k in ("format", "algorithm", "env", "env_steps")}
    return {"out": str(out), **kept, "bytes": sum(map(len, files.values())), "agreement": agreement}


def _npz(program: Program) -> dict[str, bytes]:
    return {"interpreter.py": _own("interpreter.py"), **npz.files(program)}


def _stablehlo(program: Program) -> dict[str, bytes]:
    policy = lambda *inputs: program(*inputs)  # a NamedTuple cannot be jitted
    exported = jax_export.export(jax.jit(policy), platforms=PLATFORMS)(*(program.types[i] for i in program.inputs))
    return {"policy.jax_export": bytes(exported.serialize())}


def _onnx(program: Program) -> dict[str, bytes]:
    from jax2onnx import to_onnx

    logging.getLogger("onnx_ir").setLevel(logging.ERROR)  # it warns of values that it leaves without a type
    types = [program.types[i] for i in program.inputs]
    inputs: Any = [jax.ShapeDtypeStruct(("n", *x.shape[1:]), x.dtype) for x in types]
    memory = [f"memory_{i}" for i in range(program.num_memory)]
    flags = [*["reward"] * program.reads_reward, *["begins"] * program.reads_begins]
    names = [*_numbered("obs", program.num_obs), *memory, *flags]
    outputs = [*_numbered("action", len(program.outputs) - program.num_memory), *(f"{name}_next" for name in memory)]
    act = (lambda *x: program(*x)) if len(outputs) > 1 else (lambda *x: program(*x)[0])
    model: Any = to_onnx(act, inputs, model_name="policy", input_names=names, output_names=outputs)
    return {"policy.onnx": model.SerializeToString()}


def _numbered(name: str, count: int) -> list[str]:
    return [name] if count == 1 else [f"{name}_{i}" for i in range(count)]


FILES: dict[str, Callable[[Program], dict[str, bytes]]] = {"npz": _npz, "stablehlo": _stablehlo, "onnx": _onnx}


def _own(name: str) -> bytes:
    return Path(__file__).with_name(name).read_bytes()


@contextlib.contextmanager
def _reported(format: str) -> Iterator[None]:
    """Turns what a converter or a runtime cannot do into an InputError: they raise errors of many kinds."""
    try:
        yield
    except InputError:
        raise
    except Exception as e:  # see the docstring
        first = next(iter(str(e).strip().splitlines()), type(e).__name__)[:200]
        raise InputError(
            f"--format {format}: the policy cannot be expressed in it ({first}): use another format"
        ) from e


# ---------------------------------------------------------------- does it act as jrl does?


class _Step(NamedTuple):
    obs: PyTree  # [N, *]
    reward: np.ndarray  # [N] f32
    begins: np.ndarray  # [N] bool


def _random_steps(source: Source, count: int) -> list[_Step]:
    """Returns `_CHECKED` random observations as `count` steps of many environments; some begin anew halfway."""
    rng, size = np.random.default_rng(0), _CHECKED // count
    steps = []
    for t in range(count):
        begins = rng.random(size) < 0.5 if t == count // 2 else np.full(size, False)
        obs = random_observations(rng, source.observation, size, source.choices)
        steps.append(_Step(obs, rng.normal(size=size).astype(np.float32), begins | (t == 0)))
    return steps


def _expected(source: Source, steps: list[_Step]) -> list[PyTree]:
    run, memory, actions = jax.jit(source.step), source.memory(len(steps[0].reward)), []
    for step in steps:
        action, memory = run(step.obs, memory, step.reward, step.begins)
        actions.append(jax.tree.map(np.asarray, action))
    return actions


def _agreement(files: dict[str, bytes], steps: list[_Step], expected: list[PyTree]) -> float:
    """Returns the share of the observations for which exported files give the expected actions."""
    with tempfile.TemporaryDirectory() as made:
        for name, content in files.items():
            (Path(made) / name).write_bytes(content)
        spec = importlib.util.spec_from_file_location("jrl_exported_policy", Path(made) / "policy.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        policy = module.load(made)
        found = [policy.act(step.obs, reset=step.begins, reward=step.reward) for step in steps]
    return float(np.mean([_equal(a, b) for a, b in zip(found, expected, strict=True)]))


def _equal(found: PyTree, expected: PyTree) -> np.ndarray:
    """Returns whether all of an action is as expected, [N] bool."""
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True))
    if any(a.shape != b.shape for a, b in pairs):
        return np.zeros(len(pairs[0][1]), bool)
    # this looks for what is wrong, not for rounding: accelerators multiply with 10 bits, bfloat16 has 8
    exact = lambda x: np.issubdtype(x.dtype, np.integer)
    within = [np.abs(a - b) <= (0.0 if exact(b) else 0.02 * float(np.abs(b).max())) for a, b in pairs]
    return np.all([x.reshape(len(x), -1).all(1) for x in within], 0)


def random_observations(rng: np.random.Generator, space: Space, count: int, choices: tuple[int, ...] = ()) -> PyTree:
    """Draws [count, *] of the space's dtypes; numbers without bounds are normal with deviation 3.

    `choices` are the lengths of the parts of an action mask, each of which allows something.
    """
    found = spaces.map_leaves(lambda leaf: _random(rng, leaf, count), space)
    if choices:
        parts = [rng.integers(0, 2, (count, size)) for size in choices]
        parts = [np.where(x.any(1, keepdims=True), x, 1) for x in parts]
        found[spaces.ACTION_MASK] = np.concatenate(parts, 1).astype(found[spaces.ACTION_MASK].dtype)
    return found


def _random(rng: np.random.Generator, space: Leaf, count: int) -> np.ndarray:
    match space:
        case Discrete():
            found = rng.integers(0, space.n, count)
        case MultiDiscrete():
            found = rng.integers(0, space.nvec, (count, len(space.nvec)))
        case MultiBinary():
            found = rng.integers(0, 2, (count, *space.shape))
        case Box() if np.dtype(space.dtype).kind in "biu":
            low, high = (np.clip(b, -1000, 1000).astype(int) for b in space.bounds())
            found = rng.integers(low[None], high[None] + 1, (count, *space.shape))
        case Box():
            low, high = space.bounds()
            found = np.clip(3.0 * rng.normal(size=(count, *space.shape)), low[None], high[None])
    return found.astype(space.dtype)
