"""Fuzz of the readers of data sets: each damaged file gives a data set or one InputError, in bounded memory and time.

    python scripts/fuzz_data.py --count 5000
    python scripts/fuzz_data.py --only 123 --keep DIR     # the files of mutant 123, and what became of them

A mutant is a small data set, of each format that jrl reads, with bits flipped, bytes cut out, doubled or replaced, or
with its structure changed: members, arrays, columns and entries that are missing, renamed, of another dtype or shape,
huge, nested, linked to each other or to files outside of the data set. Prints JSON. The exit status is 1 where reading
a mutant raises something else than an InputError, ends the process, takes more than --seconds of the processor or more
memory than the limit allows, or where numbers of a file outside of the data set are in what was read.
"""

import argparse
import collections
import contextlib
import io
import json
import math
import os
import random
import resource
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import jax
import numpy as np
import pyarrow
from fuzz_configs import NASTY, TooSlow, at, at_most, places, replaced
from pyarrow import parquet

from jrl import data
from jrl.data import findings, inspection
from jrl.data.formats import files
from jrl.data.store import check_store
from jrl.errors import InputError
from jrl.spaces_json import plain
from jrl.types import Box, Dict, Discrete, MultiBinary, Tuple

ROOT = Path(__file__).parent.parent
LONGEST = 1200  # characters of one error
LIMIT = 2**24  # bytes that a data set may take here, in the place of half of the free memory
ROOM = 8 * LIMIT  # bytes that this process may grow by while it reads one
SILENT = 60.0  # seconds of the wall clock without an answer, after which a process is ended
SECRET = b"outside of the data set"  # repeated in a file that mutants refer to
Files = dict[str, bytes]  # of a data set, by their paths in its folder


# ---------------------------------------------------------------- data sets


def stores() -> dict[str, Any]:
    """Small data sets: numbers, choices, and trees of both."""
    rng = np.random.default_rng(0)
    flat = Box((3,), "float32"), Box((2,), "float32", -1.0, 1.0)
    choices = Box((4,), "float64", -5.0, 5.0), Discrete(3, "int64")
    tree = (
        Dict((("at", Tuple((Discrete(4), MultiBinary((2,))))), ("eye", Box((8, 8, 3), "uint8", 0.0, 255.0)))),
        (Discrete(3, "int64")),
    )

    def draw(space: Any, rows: int) -> Any:
        if isinstance(space, Dict):
            return {name: draw(part, rows) for name, part in space.items}
        if isinstance(space, Tuple):
            return tuple(draw(part, rows) for part in space.items)
        if isinstance(space, Box) and space.dtype != "uint8":
            return rng.uniform(-1, 1, (rows, *space.shape)).astype(space.dtype)
        shape = getattr(space, "shape", ())
        return rng.integers(0, getattr(space, "n", 2), (rows, *shape)).astype(space.dtype)

    def store(spaces: Any) -> Any:
        episodes = [
            data.Episode(
                draw(spaces[0], n + 1), draw(spaces[1], n), rng.normal(size=n).astype(np.float32), *end,
                {"log_prob": -rng.random(n).astype(np.float32), "state": rng.normal(size=(n, 2))},
                {"policy": f"no. {n}", "seed": n},
            )
            for n, end in ((3, (True, False)), (5, (False, True)), (2, (False, False)))
        ]  # fmt: skip
        return data.of_episodes(*spaces, episodes, meta={"env": "CartPole-v1"})

    return {"flat": store(flat), "choices": store(choices), "tree": store(tree)}


def sources(folder: Path) -> dict[str, Files]:
    """Returns the files of one data set of each format and kind, by name."""
    found: dict[str, Files] = {}

    def take(name: str, path: Path) -> None:
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        found[name] = {str(p.relative_to(path.parent if path.is_file() else path)): p.read_bytes() for p in files}

    for kind, store in stores().items():
        for format, name in (
            ("jrl", "x.npz"), ("d4rl", "x.hdf5"), ("minari", "x-v0"), ("rllib-json", "x.json"),
            ("rllib-json", "x.json.gz"), ("rllib-json", "x.zip"), ("rllib-parquet", "x.parquet"),
        ):  # fmt: skip
            for compress in (True, False):
                path = folder / f"{kind}-{compress}" / name
                with contextlib.suppress(InputError):  # d4rl has one array, lists have no Tuple
                    take(f"{kind} {name} {compress}", data.write(store, path, format, compress=compress))
    path = folder / "d4rl.hdf5"  # as other programs write it
    rows = np.arange(20)
    with h5py.File(path, "w") as file:
        file["observations"], file["actions"] = np.random.default_rng(0).normal(size=(20, 3)), np.zeros((20, 2), "f4")
        file["rewards"], file["terminals"], file["timeouts"] = np.ones(20), rows % 10 == 9, rows == 14
        file["infos/qpos"], file["infos/name"] = np.ones((20, 2)), "x"
    take("d4rl", path)
    take("minari pictures", pictures(folder / "pictures-v0"))
    fixtures = ROOT / "tests" / "data" / "files"  # of RLlib itself
    for path in sorted(fixtures.iterdir()) if fixtures.is_dir() else []:
        if path.suffix != ".py" and not path.name.startswith("_"):
            take(f"fixture {path.name}", path)
    return found


def pictures(path: Path) -> Path:
    """Writes Minari's HDF5 form with pictures as JPEG."""
    from PIL import Image

    store = stores()["tree"]
    space = Box((8, 8, 3), "uint8", 0.0, 255.0)
    data.write(data.of_episodes(space, store.action_space, [
        e.replace(obs=e.obs["eye"]) for e in store.episodes()]), path, "minari")  # fmt: skip
    with h5py.File(path / "data" / "main_data.hdf5", "r+") as file:
        for e, episode in enumerate(store.episodes()):
            raw = []
            for picture in episode.obs["eye"]:
                Image.fromarray(picture).save(buffer := io.BytesIO(), format="JPEG")
                raw.append(np.frombuffer(buffer.getvalue(), np.uint8))
            group = file[f"episode_{e}"]
            del group["observations"]
            made = group.create_dataset("observations", (len(raw),), h5py.vlen_dtype(np.uint8))
            for i, x in enumerate(raw):
                made[i] = x
    return path


# ---------------------------------------------------------------- mutations


def damage(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Damages the bytes of a file in some places; says how."""
    if not content:
        return b"x", "a byte"
    found = bytearray(content)
    kind = rng.choice(["bits"] * 6 + ["bytes", "bytes", "cut", "short", "double", "zeros", "words"])
    for _ in range(rng.choice([1, 1, 1, 2, 4, 16])):
        i, n = rng.randrange(len(found)), rng.randrange(1, 9)
        if kind == "bits":
            found[i] ^= 1 << rng.randrange(8)
        elif kind == "bytes":
            found[i : i + n] = rng.randbytes(n)
        elif kind == "cut":
            del found[i : i + n]
        elif kind == "short":
            del found[max(1, i) :]
        elif kind == "double":
            found[i:i] = found[i : i + 64 * n]
        elif kind == "zeros":
            found[i : i + 64 * n] = bytes(len(found[i : i + 64 * n]))
        else:  # what a length, a count or an offset may be
            word = rng.choice([0, 1, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1])
            found[i : i + 8] = struct.pack("<Q", word)[: len(found[i : i + 8])]
        if not found:
            break
    return bytes(found), kind


def odd_array(rng: random.Random, rows: int) -> Any:
    """An array that may not be what belongs there."""
    n = rng.choice([0, 1, rows, rows, rows, rows + 1, 7])
    return rng.choice([
        lambda: np.zeros(n), lambda: np.zeros((n, 3), "f4"), lambda: np.zeros((n, 1), "i8"), lambda: np.full(n, np.nan),
        lambda: np.zeros((n, 2, 2)), lambda: np.array(["a"] * max(n, 1)), lambda: np.array([b"ab"] * max(n, 1)),
        lambda: np.zeros(n, [("a", "f4"), ("b", "i8")]), lambda: np.zeros(n, "c16"), lambda: np.zeros(n, ">f4"),
        lambda: np.zeros(n, "f2"), lambda: np.full(n, 2**63, "u8"), lambda: np.full(n, -5), lambda: np.full(n, 0.5),
        lambda: np.array(3.0), lambda: np.zeros((0, 3)), lambda: np.zeros((n, 0)), lambda: np.ones(n, bool),
        lambda: np.zeros(n, "M8[s]"), lambda: np.full(n, 1e308), lambda: np.full(n, 2**62), lambda: np.zeros((1,) * 20),
    ])()  # fmt: skip


def head(descr: str = "<f4", shape: str = "(3,)", fortran: bool = False) -> str:
    return f"{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': {shape}, }}"


HEADERS = [
    head(shape="(-57, -1)"),
    head(shape="(2, 2)", fortran=True),
    head(shape="(1099511627776,)"),
    head(shape="(" + "9" * 400 + ",)"),
    head("|O"),
    head("<f0"),
    head("<V0", "(9999999999,)"),
    "(" * 500,
    "{}",
    "{'descr': [('a', '<f4')], 'shape': ()}",
]


def change_zip(content: bytes, rng: random.Random, rows: int) -> tuple[bytes, str]:
    """Changes a member of an archive."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = rng.choice(sorted(members))
    kind = rng.choice(
        ["array", "array", "header", "drop", "rename", "damage", "json", "json", "method", "encrypted", "bomb"]
    )
    method = rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    if kind == "array":
        np.save(buffer := io.BytesIO(), odd_array(rng, rows))
        members[name] = buffer.getvalue()
    elif kind == "header":
        text = rng.choice(HEADERS).encode() + b"\n"
        members[name] = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + bytes(rng.choice([0, 12, 228]))
    elif kind == "drop":
        del members[name]
    elif kind == "rename":
        members[rng.choice(["x", "../x.npy", "/x.npy", ".npy", "obs.npy", name * 40])] = members.pop(name)
    elif kind == "json" and (of := next((n for n in members if n.endswith(".json")), None)):
        members[of] = change_json(members[of], rng)[0]
        name = of
    elif kind == "bomb":
        members[name], method = members[name][:128] + bytes(2 * LIMIT), zipfile.ZIP_DEFLATED
    else:
        members[name] = damage(members[name], rng)[0]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method, compresslevel=1) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n, x in members.items():
            archive.writestr(n, x)
    found = bytearray(buffer.getvalue())
    if kind in ("method", "encrypted"):
        for mark, offset in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
            if kind == "encrypted":
                offset -= 2
            place = found.find(mark)
            found[place + offset : place + offset + 2] = struct.pack("<H", 99 if kind == "method" else 1)
    return bytes(found), f"{kind} {name[:60]}"


def change_json(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Changes a value in a line of JSON, or its text."""
    lines = content.split(b"\n")
    n = rng.randrange(len(lines))
    try:
        tree = json.loads(lines[n])
        path = rng.choice(list(places(tree)))
    except (ValueError, IndexError):
        return damage(content, rng)
    value, parent = at(tree, path), at(tree, path[:-1])
    kind = rng.choice(["value", "value", "drop", "rename", "nest", "copy", "again", "texts", "long"])
    key = ".".join(map(str, path))[:80]
    if kind == "drop" and isinstance(parent, dict):
        del parent[path[-1]]
    elif kind == "rename" and isinstance(parent, dict):
        parent[rng.choice(["x", "", "a/b", "t", "eps_id", "infos", "rewards"])] = parent.pop(path[-1])
    elif kind == "nest":
        replaced(
            tree,
            path,
            rng.choice([[value], {"x": value}, [[value], [value, value]], json.loads("[" * 900 + "]" * 900)]),
        )
    elif kind == "copy":
        replaced(tree, path, at(tree, rng.choice(list(places(tree)))))
    elif kind == "again" and isinstance(value, list):
        replaced(tree, path, rng.choice([value * 3, value[:-1], value[::-1], [*value, None], [*value, "x"]]))
    elif kind == "texts":
        replaced(tree, path, ["a" * rng.choice([1, 10**6]), "b", "c"])
    elif kind == "long":
        replaced(tree, path, rng.choice(["x" * 10**6, 10**400, [0] * 10**5, {str(i): i for i in range(2000)}]))
    else:
        replaced(tree, path, rng.choice(NASTY))
    try:
        lines[n] = json.dumps(tree).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError):  # it stands in itself, or a key that is no text
        return damage(content, rng)
    if rng.random() < 0.02:
        lines[n] = rng.choice([b"[" * 10**5, b'{"a":' * 10**5, b"9" * 10**5, b"nul", b"\xff\xfe{}"])
    return b"\n".join(lines), f"{kind} {key}"


def change_hdf5(path: Path, rng: random.Random, rows: int, secret: Path) -> str:
    """Changes the structure of an HDF5 file in place."""
    with h5py.File(path, "r+") as file:
        names: list[str] = []
        file.visit(names.append)
        name = rng.choice(names)
        kind = rng.choice([
            "array", "array", "array", "drop", "group", "text", "vlen", "empty", "huge", "fill", "external", "virtual",
            "link", "soft", "loop", "self", "attribute", "attribute", "rename", "type", "bomb", "reference",
        ])  # fmt: skip
        old = file[name]
        if kind == "attribute":
            values = [2**62, -1, "x" * 5000, "[" * 5000, np.zeros(3), "{}", '{"observation": 1}', h5py.Empty("f4"), 0.5]
            key = rng.choice([*old.attrs, "jrl", "seed", "id"])
            old.attrs[key] = rng.choice(values)
            return f"{kind} {name} {key}"
        shape = old.shape if isinstance(old, h5py.Dataset) else (rows,)
        if kind == "loop":
            group = old if isinstance(old, h5py.Group) else old.parent
            group["again"], group["more"] = rng.choice([file["/"], group]), group
            return f"{kind} {group.name}"
        if kind != "self":
            del file[name]
        if kind == "array":
            x = odd_array(rng, rows)
            if x.dtype.kind == "U":
                file.create_dataset(name, data=x.astype(object), dtype=h5py.string_dtype())
            elif x.dtype.kind != "M":
                file[name] = x
        elif kind == "group":
            file.create_group(name)["x"] = np.zeros(rows)
        elif kind == "text":
            file[name] = "a" * 5000
        elif kind == "vlen":
            made = file.create_dataset(name, (rows,), h5py.vlen_dtype(rng.choice([np.uint8, np.float64])))
            for i in range(rng.randrange(rows)):
                made[i] = np.ones(rng.randrange(9))
        elif kind == "empty":
            file[name] = h5py.Empty(rng.choice(["f4", "i8", "S3"]))
        elif kind == "huge":
            many = rng.choice([10**12, 2**31, 2**63 - 1, LIMIT])
            file.create_dataset(name, (many,), "f4", chunks=(1024,), maxshape=(None,))
        elif kind == "bomb":
            file.create_dataset(name, data=np.zeros(4 * LIMIT, "u1"), compression="gzip", chunks=(2**20,))
        elif kind == "fill":
            file.create_dataset(name, (rows, 3), "f4", fillvalue=np.nan, chunks=(1, 3))
        elif kind == "external":
            file.create_dataset(name, (rows,), "u1", external=[(str(secret), 0, rows)])
        elif kind == "virtual":
            layout = h5py.VirtualLayout((rows,), "f8")
            layout[:] = h5py.VirtualSource(str(secret) + ".hdf5", "x", (rows,))
            file.create_virtual_dataset(name, layout)
        elif kind == "link":
            file[name] = h5py.ExternalLink(str(secret) + ".hdf5", "x")
        elif kind == "soft":
            file[name] = h5py.SoftLink(rng.choice(["/", "/nowhere", names[0], "."]))
        elif kind == "self":
            file["x" + name.replace("/", "_")] = old
        elif kind == "rename":
            file["x/" + name] = np.zeros(shape or (1,))
        elif kind == "type":
            file[name] = np.dtype("f4")
        elif kind == "reference":
            file.create_dataset(name, (rows,), h5py.ref_dtype)
    return f"{kind} {name}"


def odd_column(rng: random.Random, rows: int) -> Any:
    """A column that may not be what belongs there."""
    value = rng.choice([[1.0, 2.0], {"a": 1.0}, "text", b"\xff", 2**62, math.nan, 0.5, True, [[1], [2]], "x" * 10**5])
    return rng.choice([
        lambda: pyarrow.array([value] * rows), lambda: pyarrow.array([value] * rows), lambda: pyarrow.nulls(rows),
        lambda: pyarrow.array([[0.0] * i for i in range(rows)]), lambda: pyarrow.array([None, *[1.0] * (rows - 1)]),
        lambda: pyarrow.array(["a", *["b"] * (rows - 1)]).dictionary_encode(),
        lambda: pyarrow.array([0] * rows, pyarrow.timestamp("s")),
        lambda: pyarrow.array([2**64 - 1] * rows, pyarrow.uint64()),
        lambda: pyarrow.array([{}] * rows, pyarrow.struct([])),
        lambda: pyarrow.array([[]] * rows, pyarrow.list_(pyarrow.float32())),
    ])()  # fmt: skip


def change_table(path: Path, rng: random.Random) -> str:
    """Changes a column or the schema of a table."""
    table = parquet.read_table(path)
    i, rows = rng.randrange(table.num_columns), table.num_rows
    name = table.column_names[i]
    kind = rng.choice(["column"] * 5 + ["drop", "rename", "metadata", "field", "rows", "double", "constant"])
    if kind == "drop":
        table = table.drop_columns([name])
    elif kind == "rename":
        table = table.rename_columns(
            [rng.choice(["x", "obs", "t", "item"]) if n == name else n for n in table.column_names]
        )
    elif kind == "rows":
        table = table.slice(0, rng.choice([0, 1, max(0, rows - 1)]))
    elif kind == "double":
        table = table.append_column(name, table.column(i))
    elif kind == "metadata":
        given = rng.choice([b"{}", b"[" * 5000, b"null", b'{"observation": {}, "action": {}}', b"\xff"])
        table = table.replace_schema_metadata({b"jrl": given})
    elif kind == "field":
        named = rng.choice(
            [b"ray.data.arrow_tensor_v2", b"arrow.fixed_shape_tensor", b"x.y", b"ray.data.arrow_variable"]
        )
        shape = rng.choice(
            [b"{}", b"[3]", b"[-1]", b'{"shape": [2, 2]}', b"[" * 5000, b"\x80\x04.", b'{"shape": [9e99]}']
        )
        field = table.schema.field(i).with_metadata(
            {b"ARROW:extension:name": named, b"ARROW:extension:metadata": shape}
        )
        try:
            table = table.set_column(i, field, table.column(i))
        except (pyarrow.ArrowException, ValueError):
            return "nothing"
    elif kind == "constant":  # a run of equal numbers takes a few bytes
        many = 2 * LIMIT
        parquet.write_table(pyarrow.table({n: pyarrow.repeat(1.0, many // 8) for n in table.column_names}), path)
        return f"{kind} {name}"
    else:
        column = odd_column(rng, rows)
        if len(column) != rows:
            return "nothing"
        table = table.set_column(i, name, column)
    with contextlib.suppress(pyarrow.ArrowException):  # what a format cannot hold
        parquet.write_table(table, path)
    return f"{kind} {name}"


def make(seed: int, number: int, given: dict[str, Files], folder: Path, secret: Path) -> tuple[Path, str]:
    """Writes mutant `number` of a seed; returns its path, and what was done."""
    rng = random.Random(f"{seed}-{number}")
    source = rng.choice(sorted(given))
    root = folder / ("x-v0" if "minari" in source or "-v0" in source else "x")
    root.mkdir()
    for name, content in given[source].items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    done = []
    for _ in range(rng.choice([1, 1, 1, 2])):
        path = root / rng.choice(sorted(given[source]))
        if not path.is_file():
            continue
        content, rows, how = path.read_bytes(), rng.choice([3, 10, 13, 20]), ""
        if rng.random() < 0.6:
            try:
                if path.suffix in (".npz", ".zip"):
                    content, how = change_zip(content, rng, rows)
                elif path.suffix == ".json":
                    content, how = change_json(content, rng)
                elif path.suffix in (".hdf5", ".h5"):
                    how = change_hdf5(path, rng, rows, secret)
                    content = path.read_bytes()
                elif path.suffix == ".parquet":
                    how = change_table(path, rng)
                    content = path.read_bytes()
            except Exception as e:  # it was damaged before, so that its structure cannot be read
                how = f"nothing: {type(e).__name__}"
        if not how:
            content, how = damage(content, rng)
        path.write_bytes(content)
        if rng.random() < 0.01:
            path.unlink()
            how = "gone"
        done.append(f"{path.name}: {how}")
    return root, f"{source}; {', '.join(done)}"


# ---------------------------------------------------------------- what becomes of them


def look(path: Path) -> str:
    """Reads a mutant and says what `jrl data inspect` does of it: "refused" or "read". Raises what it should not."""
    try:
        store = data.read(path)
    except InputError as e:
        long = [error for error in e.errors if not error or len(error) > LONGEST]
        assert not long, f"an error of {len(long[0])} characters: {long[0][:2000]}"
        cause: BaseException | None = e
        while cause is not None:
            assert not isinstance(cause, MemoryError), "more memory was asked for than what is in the file announces"
            cause = cause.__cause__
        return "refused"
    check_store(store)
    assert store.num_episodes >= 1 and (store.lengths() >= 1).all()
    for x in jax.tree.leaves((store.obs, store.action, store.reward, store.columns)):
        assert SECRET[:8] not in x.tobytes(), "what was read has numbers of a file outside of the data set"
    with np.errstate(all="ignore"):
        json.dumps(plain(inspection.summarise(store)))
        findings.check_data(store)
    return "read"


def outcomes(numbers: range, seed: int, seconds: float = 10.0) -> Iterator[tuple[int, str, str]]:
    """Yields (number, "", "") as each mutant begins, and (number, what became of it, a fault or "") behind it."""
    before, files.size_limit = files.size_limit, lambda: LIMIT
    warnings.simplefilter("ignore")
    try:
        with tempfile.TemporaryDirectory() as folder:
            given = sources(Path(folder) / "sources")
            secret = Path(folder) / "secret"
            secret.write_bytes(SECRET * 100)
            with h5py.File(f"{secret}.hdf5", "w") as file:
                file["x"] = np.frombuffer((SECRET * 100)[: 8 * 100], np.float64)
            for number in numbers:
                yield number, "", ""
                where = Path(folder) / "mutant"
                shutil.rmtree(where, ignore_errors=True)
                where.mkdir()
                path, what = make(seed, number, given, where, secret)
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
                found, fault = "fault", ""
                try:
                    with at_most(seconds):
                        found = look(path)
                    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - peak
                    assert grown < ROOM, f"{grown / 1e6:.0f} MB of memory, where {LIMIT / 1e6:.0f} MB are the limit"
                except (Exception, TooSlow) as e:
                    at_line = traceback.extract_tb(e.__traceback__)[-1]
                    name = f"{type(e).__name__}: {str(e)[:300]} ({Path(at_line.filename).name}:{at_line.lineno})"
                    found, fault = "fault", f"{number} ({what}): {name}"
                yield number, found, fault
    finally:
        files.size_limit = before


def run(count: int, seed: int = 0, *, first: int = 0, seconds: float = 10.0) -> dict[str, Any]:
    """Reads so many mutants in this process, which a fault of a library's would end.

    Returns:
      `refused` and `read`, how many were; `faults`, a text for each other one.
    """
    counts: collections.Counter[str] = collections.Counter()
    faults = []
    for _, found, fault in outcomes(range(first, first + count), seed, seconds):
        counts[found] += bool(found)
        faults += [fault] if fault else []
    return {"count": count, "seed": seed, **{k: counts[k] for k in ("refused", "read")}, "faults": faults}


def watched(count: int, seed: int, *, first: int, seconds: float, tell: Callable[[str], None]) -> dict[str, Any]:
    """As `run`, in processes of their own: the end of one is the fault of the mutant that it was reading."""
    counts: collections.Counter[str] = collections.Counter()
    faults: list[str] = []
    at_number, end = first, first + count
    while at_number < end:
        given = ["--worker", "--first", str(at_number), "--count", str(end - at_number), "--seed", str(seed)]
        process = subprocess.Popen(
            [sys.executable, __file__, *given, "--seconds", str(seconds)], stdout=subprocess.PIPE,
            bufsize=0, env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        current = -1
        assert process.stdout is not None
        while True:
            ready, _, _ = select.select([process.stdout], [], [], SILENT)
            line = process.stdout.readline() if ready else b""
            if not line:
                break
            current, found, fault = json.loads(line)
            if found:
                counts[found] += 1
                at_number = current + 1
            if fault:
                faults.append(fault)
                tell(fault)
        process.kill()
        status = process.wait()
        if current < at_number and at_number < end:
            raise RuntimeError(f"a process ended with status {status} before it read anything")
        if at_number < end:
            ended = f"the process ended by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
            how = ended if ready else f"no answer in {SILENT:g} s"
            faults.append(f"{current}: {how}")
            tell(faults[-1])
            at_number = current + 1
    return {"count": count, "seed": seed, **{k: counts[k] for k in ("refused", "read")}, "faults": faults}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first mutant")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=10.0, help="of the processor, for each")
    parser.add_argument("--only", type=int, help="one mutant, in this process, with the whole error")
    parser.add_argument("--keep", type=Path, help="with --only: folder that the mutant is written to")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        for line in outcomes(range(args.first, args.first + args.count), args.seed, args.seconds):
            print(json.dumps(line), flush=True)
        return 0
    if args.only is not None:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "secret").write_bytes(SECRET * 100)
            where = args.keep or Path(folder) / "mutant"
            where.mkdir(parents=True)
            given = sources(Path(folder) / "sources")
            path, what = make(args.seed, args.only, given, where, Path(folder) / "secret")
            print(what)
            files.size_limit = lambda: LIMIT
            try:
                print(data.read(path))
            except InputError as e:
                print(*e.errors, sep="\n")
        return 0
    tell = lambda line: print(line, file=sys.stderr, flush=True)
    result = watched(args.count, args.seed, first=args.first, seconds=args.seconds, tell=tell)
    print(json.dumps(result, indent=2))
    return 1 if result["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
