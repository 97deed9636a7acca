"""Weights from files of other programs: npz and safetensors, formats without executable content."""

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jrl.errors import InputError
from jrl.host.machine import require
from jrl.types import PyTree


def read_weights(
    path: Path, mapping: Mapping[str, str] | None, weights: Mapping[str, PyTree]
) -> tuple[dict[str, PyTree], list[str]]:
    """Returns weights with parameters from a file: see `Algorithm.import_weights`.

    Args:
      path, mapping: its arguments.
      weights: present weights by field, as `Session.get_weights` returns them.
    Returns:
      Changed fields, and names of changed parameters.
    """
    arrays, params = _read_arrays(path), weights["params"]
    named = {_path_name(p): x for p, x in jax.tree.leaves_with_path(params)}
    if mapping is None:
        mapping = {name: name for name in named if name in arrays}
        if not mapping:
            raise InputError(
                f"import_weights: expected arrays with names of parameters ({_join_names(named)}), got "
                f"{_join_names(arrays)} in {path}: give mapping={{parameter: name in the file}}"
            )
    faults, taken = [], {}
    for name, source in mapping.items():
        found = arrays.get(source)
        if found is None and source.endswith(".T") and source[:-2] in arrays:
            found = arrays[source[:-2]].T
        if name not in named:
            faults.append(f"unknown parameter {name}{_suggest_name(name, named)}: parameters() lists all")
        elif found is None:
            faults.append(f"{path} has no {source}{_suggest_name(source, arrays)}: it has {_join_names(arrays)}")
        elif found.shape != np.shape(named[name]):
            fix = f': "{source}.T" transposes it' if found.T.shape == np.shape(named[name]) else ""
            faults.append(f"{name}: expected the shape {np.shape(named[name])}, got {found.shape} of {source}{fix}")
        elif not (np.issubdtype(found.dtype, np.number) and np.isfinite(found).all()):
            faults.append(f"{name}: expected finite numbers, got others in {source} of {path}")
        else:
            taken[name] = found.astype(np.asarray(named[name]).dtype)
    if faults:
        raise InputError(*(f"import_weights: {fault}" for fault in faults))
    new = jax.tree.map_with_path(lambda p, x: taken.get(_path_name(p), x), params)
    changed: dict[str, PyTree] = {"params": new}
    target = weights.get("target_params", ())
    if isinstance(target, dict) and target.keys() != new.keys():  # only some parts have a target network
        changed["target_params"] = {name: new[name] for name in target}
    elif jax.tree.leaves(target):
        changed["target_params"] = new
    return changed, sorted(taken)


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    kind = path.suffix[1:]
    if kind not in ("npz", "safetensors"):
        raise InputError(f"import_weights: expected *.npz or *.safetensors, got {path}: save the arrays in that format")
    if kind == "safetensors":
        require("safetensors", "export", f"import_weights {path}")
    try:
        if kind == "npz":
            with np.load(path, allow_pickle=False) as found:
                return dict(found)
        from safetensors.numpy import load_file

        return load_file(path)
    except Exception as e:  # the readers raise errors of many types
        raise InputError(f"import_weights: {path} cannot be read as {kind}: {e}") from e


def _path_name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _suggest_name(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), 1)
    return f" (did you mean {near[0]}?)" if near else ""


def _join_names(names: Mapping[str, Any]) -> str:
    shown = list(names)[:6]
    return ", ".join(shown) + (", ..." if len(names) > len(shown) else "")
