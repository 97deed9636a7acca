"""The three formats of an export, and the check that each acts as jrl does."""

import contextlib
import importlib.metadata
import importlib.util
import json
import logging
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export as jax_export

from jrl.export import directory, npz
from jrl.export.program import Program, trace
from jrl.export.source import Source
from jrl.types import Box, Discrete, InputError, MultiDiscrete, Space

PLATFORMS = ("cpu", "cuda", "tpu")
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
    program = trace(source.act, source.observation, source.carry)
    # before any conversion: jax2onnx replaces functions of jax.numpy for the rest of the process
    obs = random_observations(np.random.default_rng(0), source.observation, _CHECKED)
    expected = np.asarray(jax.jit(source.act)(obs, source.carry(_CHECKED)))
    with _reported(format):
        files = {"policy.py": _own("policy.py"), **FILES[format](program)}
    about = {
        "kind": directory.KIND,
        "version": 1,
        "format": format,
        **source.about,
        "jrl": importlib.metadata.version("jrl"),
        "jax": jax.__version__,
        "files": sorted(files),
    }
    files[directory.ABOUT] = json.dumps(about, indent=1).encode()
    with _reported(format):
        agreement = _agreement(files, obs, expected)
    if agreement < _AGREEMENT:
        raise InputError(
            f"--format {format}: the exported policy gives jrl's action for {agreement:.0%} of random observations "
            "only: use another format, and please report this"
        )
    directory.write(out, files)
    size = sum(map(len, files.values()))
    kept: dict[str, Any] = {k: about[k] for k in ("format", "algorithm", "env", "env_steps") if k in about}
    return {"out": str(out), **kept, "bytes": size, "agreement": agreement}


def _npz(program: Program) -> dict[str, bytes]:
    return {"interpreter.py": _own("interpreter.py"), **npz.files(program)}


def _stablehlo(program: Program) -> dict[str, bytes]:
    policy = lambda obs: program(obs)  # a NamedTuple cannot be jitted
    exported = jax_export.export(jax.jit(policy), platforms=PLATFORMS)(program.types[program.input])
    return {"policy.jax_export": bytes(exported.serialize())}


def _onnx(program: Program) -> dict[str, bytes]:
    from jax2onnx import to_onnx

    logging.getLogger("onnx_ir").setLevel(logging.ERROR)  # it warns of values that it leaves without a type
    obs = program.types[program.input]
    inputs: Any = [jax.ShapeDtypeStruct(("n", *obs.shape[1:]), obs.dtype)]
    model: Any = to_onnx(program, inputs, model_name="policy", input_names=["obs"], output_names=["action"])
    return {"policy.onnx": model.SerializeToString()}


FILES: dict[str, Callable[[Program], dict[str, bytes]]] = {"npz": _npz, "stablehlo": _stablehlo, "onnx": _onnx}


def _own(name: str) -> bytes:
    return Path(__file__).with_name(name).read_bytes()


@contextlib.contextmanager
def _reported(format: str) -> Iterator[None]:
    """What a converter or a runtime cannot do becomes an InputError: they raise errors of many kinds."""
    try:
        yield
    except InputError:
        raise
    except Exception as e:
        first = next(iter(str(e).strip().splitlines()), type(e).__name__)[:200]
        raise InputError(
            f"--format {format}: the policy cannot be expressed in it ({first}): use another format"
        ) from e


# ---------------------------------------------------------------- does it act as jrl does?


def _agreement(files: dict[str, bytes], obs: np.ndarray, expected: np.ndarray) -> float:
    """The share of the observations [N, *] for which exported files give the expected actions [N, *]."""
    with tempfile.TemporaryDirectory() as made:
        for name, content in files.items():
            (Path(made) / name).write_bytes(content)
        spec = importlib.util.spec_from_file_location("jrl_exported_policy", Path(made) / "policy.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found = module.load(made).act(obs)
    if found.shape != expected.shape:
        return 0.0
    exact = np.issubdtype(expected.dtype, np.integer)
    # this looks for what is wrong, not for rounding: accelerators multiply with 10 bits, bfloat16 has 8
    tolerance = 0.0 if exact else 0.02 * float(np.abs(expected).max())
    equal = np.abs(found - expected) <= tolerance
    return float(equal.reshape(len(obs), -1).all(1).mean())


def random_observations(rng: np.random.Generator, space: Space, count: int) -> np.ndarray:
    """[count, *] of the space's dtype; numbers without bounds are normal with deviation 3."""
    match space:
        case Discrete():
            found = rng.integers(0, space.n, count)
        case MultiDiscrete():
            found = rng.integers(0, space.nvec, (count, len(space.nvec)))
        case Box() if np.issubdtype(np.dtype(space.dtype), np.integer):
            low, high = (np.clip(b, -1000, 1000).astype(int) for b in space.bounds())
            found = rng.integers(low[None], high[None] + 1, (count, *space.shape))
        case Box():
            low, high = space.bounds()
            found = np.clip(3.0 * rng.normal(size=(count, *space.shape)), low[None], high[None])
    return found.astype(space.dtype)
