"""How fast are data sets read? Each format beside the barest reader of the same files, in the same rounds.

    python scripts/bench_data.py                # 1000 MB of arrays, one JSON line for each format
    python scripts/bench_data.py --mb 100

Episodes of 1000 steps, 17 numbers seen and 6 done, as of HalfCheetah, are written into a temporary directory: as jrl's
shards, stored and compressed, and as RLlib's Parquet files of transitions. `ours_s` is what `jrl.data.read` takes, down
to the store of episodes; `bare_s` is `numpy.load` of every array, or `pyarrow.parquet.read_table`. Both are medians of
the rounds, in which they take turns; `ratio` is bare_s / ours_s, at least 0.5 is wanted.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from pyarrow import parquet

from jrl import data
from jrl.types import Box

OBS, ACTION, STEPS, WIDTH = 17, 6, 1000, 4  # of an episode; bytes of a number
FORMATS = {"jrl stored": ("jrl", False), "jrl compressed": ("jrl", True), "rllib-parquet": ("rllib-parquet", True)}


def episodes(mb: float) -> data.EpisodeStore:
    """Makes a store whose arrays have that many megabytes."""
    rng = np.random.default_rng(0)
    of_one = STEPS * WIDTH * (OBS + ACTION + 1)
    normal = lambda *shape: rng.standard_normal(shape, np.float32)
    found = [
        data.Episode(normal(STEPS + 1, OBS), normal(STEPS, ACTION), normal(STEPS), False, True)
        for _ in range(max(1, round(mb * 1e6 / of_one)))
    ]
    return data.of_episodes(Box((OBS,)), Box((ACTION,), "float32", -10.0, 10.0), found)


def bare(path: Path) -> int:
    """Reads all arrays of all files by numpy or pyarrow alone; how many there are."""
    count = 0
    for file in sorted(path.rglob("*.npz")):
        with np.load(file) as arrays:
            count += len([arrays[name] for name in arrays.files])
    return count or sum(parquet.read_table(file).num_columns for file in sorted(path.rglob("*.parquet")))


def seconds(read: Callable[[Path], object], path: Path) -> float:
    """Times one call."""
    start = time.perf_counter()
    found = read(path)
    taken = time.perf_counter() - start
    del found
    return taken


def main() -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    p.add_argument("--mb", type=float, default=1000.0, help="of arrays (default 1000)")
    p.add_argument("--rounds", type=int, default=3)
    args = p.parse_args()
    store = episodes(args.mb)
    with tempfile.TemporaryDirectory() as directory:
        for name, (kind, compress) in FORMATS.items():
            path = Path(directory) / name.replace(" ", "-")
            data.write(store, path, kind, compress=compress)
            readers = {"ours_s": data.read, "bare_s": bare}
            for read in readers.values():  # once for what is imported, and for the cache of the files
                read(path)
            found: dict[str, list[float]] = {key: [] for key in readers}
            for _ in range(args.rounds):
                for key, read in readers.items():
                    found[key].append(seconds(read, path))
            taken = {key: statistics.median(times) for key, times in found.items()}
            ratio = taken["bare_s"] / taken["ours_s"]
            rounded = {key: round(x, 4) for key, x in taken.items()}
            files = sum(file.is_file() for file in path.rglob("*"))
            print(json.dumps({"format": name, "mb": args.mb, "files": files, **rounded, "ratio": round(ratio, 3)}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
