"""Summary of a data set, as plain data or text."""

import collections
import math
from typing import Any

import jax
import numpy as np

from jrl.data.store import LOG_PROB, EpisodeStore
from jrl.errors import counted
from jrl.spaces_json import space_to_json
from jrl.types import Dict, Space, Tuple

QUANTILES = (0, 25, 50, 75, 100)  # percent
_NAMES = ("min", "q25", "median", "q75", "max")
_MAX_VALUES = 8  # shown values of a label


def summarise(store: EpisodeStore) -> dict[str, Any]:
    """Returns the summary of a data set, as plain data."""
    terminated, truncated = store.terminated, store.truncated
    kind = lambda x: f"{x.dtype.name}{list(x.shape[1:])}"
    frequent = lambda x: collections.Counter(x.tolist()).most_common(_MAX_VALUES)
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
        "returns": summarise_numbers(store.returns()),
        "lengths": summarise_numbers(store.lengths()),
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


def summarise_numbers(x: np.ndarray) -> dict[str, float]:
    """Returns mean, standard deviation and `QUANTILES` of the finite numbers of x [N], by name."""
    x = x[np.isfinite(x)]
    if not len(x):
        return dict.fromkeys(("mean", "std", *_NAMES), float("nan"))
    values = np.percentile(x, QUANTILES)
    named = dict(zip(_NAMES, map(float, values), strict=True))
    return {"mean": float(x.mean()), "std": float(x.std()), **named}


def format_histogram(x: np.ndarray, bins: int = 10, width: int = 40) -> list[str]:
    """Returns the histogram of the finite numbers of x [N] as text: bounds, bar and count of each bin in a line."""
    counts, edges = np.histogram(x[np.isfinite(x)], bins)
    names = [f"{edge:.6g}" for edge in edges]
    size = max(map(len, names))
    bars = ["█" * math.ceil(width * count / max(1, counts.max())) for count in counts]
    rows = zip(names, names[1:], bars, counts, strict=False)
    return [f"{low:>{size}} .. {high:<{size}}  {bar} {count}" for low, high, bar, count in rows]


def format_summary(store: EpisodeStore, summary: dict[str, Any]) -> list[str]:
    """Returns a data set's summary as lines of text, with the histogram of returns."""
    ends = ", ".join(f"{n:,} {end}" for end, n in summary["ends"].items() if n)
    size = f"{summary.get('bytes_on_disk', 0) / 2**20:,.1f} MiB"
    on_disk = f": {summary['format']}, {counted(summary['files'], 'file', ',')}, {size}" if "files" in summary else ""
    more = lambda values: ", ..." * (len(values) == _MAX_VALUES)
    counts = lambda values: ", ".join(f"{value} ({n:,})" for value, n in values.items()) + more(values)
    quantiles = lambda x: ", ".join(f"{name} {x[name]:.6g}" for name in _NAMES)
    spread = lambda x: f"{x['mean']:.6g} ± {x['std']:.6g} ({quantiles(x)})"
    texts = {
        "path": summary["path"] + on_disk,
        "environment": summary["env"] or "unknown",
        "source": summary["source"],
        "episodes": f"{summary['episodes']:,}: {ends}",
        "steps": f"{summary['steps']:,}, {summary['bytes_in_memory'] / 2**20:,.1f} MiB in memory",
        "observation": describe_space(store.observation),
        "action": f"{describe_space(store.action_space)}, {summary['actions']}",
        "behaviour": f"{'with' if summary['log_prob'] else 'no'} log-probabilities of the actions",
        "columns": ", ".join(f"{name} {' '.join(kinds)}" for name, kinds in summary["columns"].items()),
        "labels": "; ".join(f"{name}: {counts(values)}" for name, values in summary["labels"].items()),
        "checksum": summary["checksum"],
        "lengths": spread(summary["lengths"]),
        "returns": spread(summary["returns"]),
    }
    bars = (f"  {line}" for line in format_histogram(store.returns()))
    return [*(f"{name:<12} {text}" for name, text in texts.items() if text), *bars]


def describe_space(space: Space) -> str:
    match space:
        case Dict():
            return "{" + ", ".join(f"{name}: {describe_space(part)}" for name, part in space.items) + "}"
        case Tuple():
            return "(" + ", ".join(map(describe_space, space.items)) + ")"
    text = str(space)
    return text if len(text) <= 100 else f"{type(space).__name__}(shape={space.shape}, dtype={space.dtype}, ...)"
