"""The formats of an export, and the comparison of their actions with jrl's."""

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
from jrl.export import c_header, directory, npz
from jrl.export.policy_function import PolicyFunction
from jrl.export.traced_program import TracedProgram, trace
from jrl.host.machine import version
from jrl.types import Box, Discrete, InputError, Leaf, MultiBinary, MultiDiscrete, PyTree, Space

PLATFORMS = ("cpu", "cuda", "tpu")
_MEMORY_STEPS = 8  # compared steps of policies with memory
_CHECKED = 256  # random observations for the comparison with jrl
_MIN_AGREEMENT = 0.9  # minimum share of equal actions: rounding may change the choice between equally good actions


def export(policy: PolicyFunction, *, format: str, out: Path) -> dict[str, Any]:
    """Writes a policy to the directory `out`.

    Args:
      policy: the policy.
      format: a key of FILES.
      out: new directory, or an earlier export to replace.
    Returns:
      The summary that `python -m jrl.export` prints; `agreement` is the share of random observations with jrl's action.
    Raises:
      InputError: the format cannot express the policy, or `out` cannot be written or holds other files.
    """
    program = trace(policy.step, policy.observation, policy.memory)
    # before the conversion: jax2onnx replaces functions of jax.numpy for the rest of the process
    steps = _draw_steps(policy, _MEMORY_STEPS if program.num_memory else 1)
    expected = _run_steps(policy, steps)
    with _report_errors(format):
        files = {"policy.py": _read_file("policy.py"), **FILES[format](program, policy)}
    about = {
        "kind": directory.KIND,
        "version": 2,
        "format": format,
        **policy.about,
        "choices": policy.choices,
        "memory": [{"shape": x.shape[1:], "dtype": x.dtype.name} for x in program.memory],
        "reads_reward": program.reads_reward,
        "reads_begins": program.reads_begins,
        "jrl": version("jrl"),
        "jax": jax.__version__,
        "files": sorted(files),
    }
    files[directory.ABOUT] = json.dumps(about, indent=1).encode()
    with _report_errors(format):
        agreement = _measure_agreement(files, steps, expected)
    if agreement < _MIN_AGREEMENT:
        raise InputError(
            f"--format {format}: the exported policy gives jrl's action for only {agreement:.0%} of random "
            "observations: use another format, and please report this"
        )
    directory.write(out, files)
    summary: dict[str, Any] = {k: about[k] for k in ("format", "algorithm", "env", "env_steps")}
    return {"out": str(out), **summary, "bytes": sum(map(len, files.values())), "agreement": agreement}


def _npz(program: TracedProgram, policy: PolicyFunction) -> dict[str, bytes]:
    return {"interpreter.py": _read_file("interpreter.py"), **npz.build_files(program)}


def _stablehlo(program: TracedProgram, policy: PolicyFunction) -> dict[str, bytes]:
    run = lambda *inputs: program(*inputs)  # jit refuses a NamedTuple
    exported = jax_export.export(jax.jit(run), platforms=PLATFORMS)(*(program.types[i] for i in program.inputs))
    return {"policy.jax_export": bytes(exported.serialize())}


def _onnx(program: TracedProgram, policy: PolicyFunction) -> dict[str, bytes]:
    from jax2onnx import to_onnx

    logging.getLogger("onnx_ir").setLevel(logging.ERROR)  # hides warnings about values without a type
    types = [program.types[i] for i in program.inputs]
    inputs: Any = [jax.ShapeDtypeStruct(("n", *x.shape[1:]), x.dtype) for x in types]
    memory = [f"memory_{i}" for i in range(program.num_memory)]
    flags = [*["reward"] * program.reads_reward, *["begins"] * program.reads_begins]
    names = [*c_header.name_values("obs", program.num_obs), *memory, *flags]
    actions = c_header.name_values("action", len(program.outputs) - program.num_memory)
    outputs = [*actions, *(f"{name}_next" for name in memory)]
    act = (lambda *x: program(*x)) if len(outputs) > 1 else (lambda *x: program(*x)[0])
    model: Any = to_onnx(act, inputs, model_name="policy", input_names=names, output_names=outputs)
    return {"policy.onnx": model.SerializeToString()}


FILES: dict[str, Callable[[TracedProgram, PolicyFunction], dict[str, bytes]]] = {
    "npz": _npz,
    "stablehlo": _stablehlo,
    "onnx": _onnx,
    "c": c_header.build_files,
}


def _read_file(name: str) -> bytes:
    return Path(__file__).with_name(name).read_bytes()


@contextlib.contextmanager
def _report_errors(format: str) -> Iterator[None]:
    """Raises errors of a converter or a runtime, which have many types, as InputError."""
    try:
        yield
    except InputError:
        raise
    except Exception as e:
        first = next(iter(str(e).strip().splitlines()), type(e).__name__)[:200]
        raise InputError(
            f"--format {format}: the format cannot express the policy ({first}): use another format"
        ) from e


# ---------------------------------------------------------------- comparison with jrl


class _Step(NamedTuple):
    obs: PyTree  # [N, *]
    reward: np.ndarray  # [N] f32
    begins: np.ndarray  # [N] bool


def _draw_steps(policy: PolicyFunction, count: int) -> list[_Step]:
    """Draws `_CHECKED` observations, as `count` steps of many environments; some episodes begin halfway."""
    rng, size = np.random.default_rng(0), _CHECKED // count
    steps = []
    for t in range(count):
        begins = rng.random(size) < 0.5 if t == count // 2 else np.full(size, False)
        obs = draw_observations(rng, policy.observation, size, policy.choices)
        steps.append(_Step(obs, rng.normal(size=size).astype(np.float32), begins | (t == 0)))
    return steps


def _run_steps(policy: PolicyFunction, steps: list[_Step]) -> list[PyTree]:
    run, memory, actions = jax.jit(policy.step), policy.memory(len(steps[0].reward)), []
    for step in steps:
        action, memory = run(step.obs, memory, step.reward, step.begins)
        actions.append(jax.tree.map(np.asarray, action))
    return actions


def _measure_agreement(files: dict[str, bytes], steps: list[_Step], expected: list[PyTree]) -> float:
    with tempfile.TemporaryDirectory() as out:
        for name, content in files.items():
            (Path(out) / name).write_bytes(content)
        spec = importlib.util.spec_from_file_location("jrl_exported_policy", Path(out) / "policy.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        exported = module.load(out)
        actions = [exported.act(step.obs, reset=step.begins, reward=step.reward) for step in steps]
    return float(np.mean([_compare_actions(a, b) for a, b in zip(actions, expected, strict=True)]))


def _compare_actions(actions: PyTree, expected: PyTree) -> np.ndarray:
    pairs = list(zip(jax.tree.leaves(actions), jax.tree.leaves(expected), strict=True))
    if any(a.shape != b.shape for a, b in pairs):
        return np.zeros(len(pairs[0][1]), bool)
    # tolerates rounding: accelerators multiply with 10 bits, and bfloat16 has 8
    is_exact = lambda x: np.issubdtype(x.dtype, np.integer)
    within = [np.abs(a - b) <= (0.0 if is_exact(b) else 0.02 * float(np.abs(b).max())) for a, b in pairs]
    return np.all([x.reshape(len(x), -1).all(1) for x in within], 0)


def draw_observations(rng: np.random.Generator, space: Space, count: int, choices: tuple[int, ...] = ()) -> PyTree:
    """Draws observations [count, *] in the space's dtypes; unbounded numbers are normal with standard deviation 3.

    `choices`: lengths of the parts of an action mask, each of which allows an action.
    """
    obs = spaces.map_leaves(lambda leaf: _draw_leaf(rng, leaf, count), space)
    if choices:
        parts = [rng.integers(0, 2, (count, size)) for size in choices]
        parts = [np.where(x.any(1, keepdims=True), x, 1) for x in parts]
        obs[spaces.ACTION_MASK] = np.concatenate(parts, 1).astype(obs[spaces.ACTION_MASK].dtype)
    return obs


def _draw_leaf(rng: np.random.Generator, space: Leaf, count: int) -> np.ndarray:
    match space:
        case Discrete():
            x = rng.integers(0, space.n, count)
        case MultiDiscrete():
            x = rng.integers(0, space.nvec, (count, len(space.nvec)))
        case MultiBinary():
            x = rng.integers(0, 2, (count, *space.shape))
        case Box() if np.dtype(space.dtype).kind in "biu":
            low, high = (np.clip(b, -1000, 1000).astype(int) for b in space.bounds())
            x = rng.integers(low[None], high[None] + 1, (count, *space.shape))
        case Box():
            low, high = space.bounds()
            x = np.clip(3.0 * rng.normal(size=(count, *space.shape)), low[None], high[None])
    return x.astype(space.dtype)
