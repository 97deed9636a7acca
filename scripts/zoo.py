"""Adds a finished run to the policies that come with jrl (`jrl zoo`): measures it, writes jrl/zoo/NAME.zip.

    python -m jrl.train ppo --out runs/cartpole
    python scripts/zoo.py runs/cartpole cartpole
    python scripts/zoo.py runs/2048 2048 --needs suites

The zip file has the run's best checkpoint and its config. jrl/zoo/entries.json gets the mean
return of 100 episodes.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from jrl import config, zoo
from jrl.run.store import checkpoint

DATE = (2026, 1, 1, 0, 0, 0)  # date in the zip file, so that the same run gives the same bytes
UNREAD = ("commit_success.txt", "params.json")  # Orbax writes a path of this machine into the first


def main() -> None:
    """Measures the run and writes the entry."""
    assert __doc__ is not None
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    p.add_argument("run", type=Path, help="run directory")
    p.add_argument("name", help="name of the entry")
    p.add_argument("--needs", help="extra of jrl that the environment needs")
    p.add_argument("--episodes", type=int, default=100, help="episodes of the evaluation (default 100)")
    args = p.parse_args()
    found = checkpoint.locate(args.run, best=None)
    command = [sys.executable, "-m", "jrl.evaluate", str(found), "--json", "--episodes", str(args.episodes)]
    played = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    target = zoo.HERE / f"{args.name}.zip"
    with tempfile.TemporaryDirectory() as place:
        run = Path(place)
        copy = Path(shutil.copytree(found, run / "checkpoints" / found.name))
        meta = checkpoint.read_meta(copy)
        meta["config"]["run"]["out"] = None  # a path of this machine
        checkpoint.write_meta(copy, meta)
        cfg = config.override(meta["config"], [])
        config.write(cfg, run)
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as file:
            for source in sorted(x for x in run.rglob("*") if x.is_file() and x.name not in UNREAD):
                info = zipfile.ZipInfo(source.relative_to(run).as_posix(), DATE)
                file.writestr(info, source.read_bytes(), zipfile.ZIP_DEFLATED)
    entry = {
        "algorithm": config.algo_name(cfg),
        "env": cfg.env.id,
        "env_steps": played["env_steps"],
        "return": round(played["return"], 3),
        "return_std": round(played["return_std"], 3),
        "episodes": played["episodes"],
        "seed": cfg.run.seed,
        "needs": args.needs,
    }
    known = zoo.entries() if (zoo.HERE / "entries.json").exists() else {}
    lines = [f"{json.dumps(n)}: {json.dumps(e)}" for n, e in sorted((known | {args.name: entry}).items())]
    (zoo.HERE / "entries.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"{target.name}: {target.stat().st_size / 1000:.0f} kB, {entry}")


if __name__ == "__main__":
    main()
