"""Summary of a data set, which can be written as JSON, and a histogram of its returns as text."""

import collections
from typing import Any

import jax
import numpy as np

from jrl.data.store import LOG_PROB, EpisodeStore
from jrl.errors import counted
from jrl.spaces_json import space_to_json
from jrl.types import Dict, Space, Tuple

QUANTILES = (0, 25, 50, 75, 100)  # percent
_NAMES = ("min", "q25", "median", "q75", "max")
_BLOCKS = " ▏▎▍▌▋▊▉█"
_MOST_VALUES = 8  # of a label


def summary(store: EpisodeStore) -> dict[str, Any]:
    """Summarises a data set as plain data; returns and lengths with mean, standard deviation and `QUANTILES`."""
    terminated, truncated = store.terminated, store.truncated
    kind = lambda x: f"{x.dtype.name}{list(x.shape[1:])}"
    frequent = lambda x: collections.Counter(x.tolist()).most_common(_MOST_VALUES)
    return {
        "path": store.name,
        "env": store.meta.get("env"),
        "source": store.meta.get("source"),
        "episodes": store.num_episodes,
        "steps": store.num_steps,
        "bytes_in_memory": store.num_bytes(),
        "checksum": store.checksum(),
        "observation": space_to_json(store.observation),
        "action": space_to_json(store.action_space),
        "actions": store.meta.get("actions", "the environment's own"),
        "returns": distribution(store.returns()),
        "lengths": distribution(store.lengths()),
        "ends": {
            "terminated": int((terminated & ~truncated).sum()),
            "truncated": int((truncated & ~terminated).sum()),
            "both": int((terminated & truncated).sum()),
            "cut": int((~terminated & ~truncated).sum()),
        },
        "log_prob": LOG_PROB in store.columns,
        "columns": {name: [kind(x) for x in jax.tree.leaves(tree)] for name, tree in store.columns.items()},
        "labels": {name: {str(value): n for value, n in frequent(x)} for name, x in store.labels.items()},
        "meta": {k: v for k, v in store.meta.items() if k not in ("path", "env", "source", "actions")},
    }


def distribution(x: np.ndarray) -> dict[str, float]:
    """Returns mean, standard deviation and `QUANTILES` of the finite numbers of [N], by name."""
    x = x[np.isfinite(x)]
    if not len(x):
        return dict.fromkeys(("mean", "std", *_NAMES), float("nan"))
    values = np.percentile(x, QUANTILES)
    named = dict(zip(_NAMES, map(float, values), strict=True))
    return {"mean": float(x.mean()), "std": float(x.std()), **named}


def histogram(x: np.ndarray, bins: int = 10, width: int = 40) -> list[str]:
    """Returns lines with the bounds of a bin, a bar and the count in it, for the finite ones of numbers [N]."""
    x = np.asarray(x, np.float64)
    x = x[np.isfinite(x)]
    if not len(x):
        return []
    if x.min() == x.max():
        return [f"{x[0]:.6g}  {_BLOCKS[-1] * width} {len(x)}"]
    counts, edges = np.histogram(x, bins)
    names = [f"{edge:.6g}" for edge in edges]
    size = max(map(len, names))
    lines = []
    for count, low, high in zip(counts, names, names[1:], strict=False):
        eighths = -(-int(count) * width * 8 // int(counts.max()))  # rounded up: none that is there is invisible
        bar = _BLOCKS[-1] * (eighths // 8) + _BLOCKS[eighths % 8].strip()
        lines.append(f"{low:>{size}} .. {high:<{size}}  {bar} {count}")
    return lines


def lines(store: EpisodeStore, found: dict[str, Any]) -> list[str]:
    """Returns the summary `found` of a data set as lines of text, with the histogram of returns."""
    ends = ", ".join(f"{n:,} {how}" for how, n in found["ends"].items() if n)
    size = f"{found.get('bytes_on_disk', 0) / 2**20:,.1f} MiB"
    on_disk = f": {found['format']}, {counted(found['files'], 'file', ',')}, {size}" if "files" in found else ""
    more = lambda values: ", ..." * (len(values) == _MOST_VALUES)
    counts = lambda values: ", ".join(f"{value} ({n:,})" for value, n in values.items()) + more(values)
    quantiles = lambda x: ", ".join(f"{name} {x[name]:.6g}" for name in _NAMES)
    spread = lambda x: f"{x['mean']:.6g} ± {x['std']:.6g} ({quantiles(x)})"
    told = {
        "path": found["path"] + on_disk,
        "environment": found["env"] or "not said",
        "source": found["source"],
        "episodes": f"{found['episodes']:,}: {ends}",
        "steps": f"{found['steps']:,}, {found['bytes_in_memory'] / 2**20:,.1f} MiB in memory",
        "observation": space_text(store.observation),
        "action": f"{space_text(store.action_space)}, {found['actions']}",
        "behaviour": "log-probabilities are there" if found["log_prob"] else "no log-probabilities of the actions",
        "columns": ", ".join(f"{name} {' '.join(kinds)}" for name, kinds in found["columns"].items()),
        "labels": "; ".join(f"{name}: {counts(values)}" for name, values in found["labels"].items()),
        "checksum": found["checksum"],
        "lengths": spread(found["lengths"]),
        "returns": spread(found["returns"]),
    }
    bars = (f"  {line}" for line in histogram(store.returns()))
    return [*(f"{name:<12} {text}" for name, text in told.items() if text), *bars]


def space_text(space: Space) -> str:
    """Describes a space in few words."""
    match space:
        case Dict():
            return "{" + ", ".join(f"{name}: {space_text(part)}" for name, part in space.items) + "}"
        case Tuple():
            return "(" + ", ".join(map(space_text, space.items)) + ")"
    text = str(space)
    return text if len(text) <= 100 else f"{type(space).__name__}(shape={space.shape}, dtype={space.dtype}, ...)"
