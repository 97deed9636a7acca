"""Members of a population in processes of their own: where they are not one program, as with EnvPool or Gymnasium."""

import json
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from jrl import config
from jrl.errors import counted
from jrl.host import files, interruption
from jrl.sweep.members import Ends, Member, is_complete, reached

_POLL = 0.2  # seconds between two looks at who has ended
_CLOCKS = 1.0  # seconds by which the file system's clock may be behind
_CONFIGS = "configs"


def train(
    members: Sequence[Member],
    directory: Path,
    processes: int,
    interrupted: interruption.Signals,
    ends: Ends,
    pause: float = math.inf,
) -> dict[str, str]:
    """Trains each member by `python -m jrl.train`, so many at once; those that began before go on.

    What a member prints is in `console.txt` of its directory. Arguments are those of `trainer.Trainer`; at `pause`
    environment steps members pause, saved.

    Returns:
      How each ended that did, by name: `ended`, `complete` or why it ended before, `not finite: PATH`,
      `failed: status N`, `interrupted`.
    """
    found = {member.name: "complete" for member in members if is_complete(member)}
    found |= {member.name: why for member in members if (why := ends.why(member))}
    away = {member.name for member in members if member.name not in found and reached(member) >= pause}
    left = [member for member in members if member.name not in found and member.name not in away]
    running, by_name = dict[str, subprocess.Popen](), {member.name: member for member in members}
    began: dict[str, float] = {}
    print(f"{counted(len(members), 'member')}, {processes} at once, in processes of their own")
    try:
        while left or running:
            while left and len(running) < processes and not interrupted:
                member = left.pop(0)
                began[member.name] = time.time()
                running[member.name] = _started(member, directory, pause)
            for name, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[name]
                if process.returncode and (fault := _fault(by_name[name], began[name])):
                    found[name] = f"{interruption.NOT_FINITE}: {fault}"
                    ends.note(by_name[name], found[name], reached(by_name[name]))
                elif process.returncode:
                    found[name] = f"failed: status {process.returncode}"
                elif _paused(by_name[name], pause):
                    away.add(name)
                else:
                    found[name] = "ended"
                    ends.note(by_name[name], "ended", reached(by_name[name]))
                said = found.get(name, f"at {pause:,.0f} steps")
                print(f"{name}: {said}  ({len(found) + len(away)} of {len(members)})", flush=True)
            if interrupted:
                for process in running.values():
                    process.terminate()  # saves where it is
                for process in running.values():
                    process.wait()
                return {**dict.fromkeys((m.name for m in members), "interrupted"), **found}
            time.sleep(_POLL)
    finally:
        for process in running.values():
            process.kill()
    return found


def _paused(member: Member, pause: float) -> bool:
    return not is_complete(member) and reached(member) >= pause


def _fault(member: Member, since: float) -> Path | None:
    """Returns the bundle of an update that was not finite, which a process has written since then."""
    written = (member.directory / "nonfinite").glob("*/")
    return next((path for path in written if path.stat().st_mtime >= since - _CLOCKS), None)


def _started(member: Member, directory: Path, pause: float) -> subprocess.Popen:
    path = directory / _CONFIGS / f"{member.name}.yaml"
    path.parent.mkdir(exist_ok=True)
    files.replace(path, config.to_yaml(member.config))
    member.directory.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "jrl.train", str(path), "--out", str(member.directory), "--resume", "auto"]
    command += [] if pause == math.inf else ["--until", str(int(pause))]
    command += ["--rows", json.dumps(member.told)] if member.told else []
    with (member.directory / "console.txt").open("a") as out:
        # a session of its own: a Ctrl-C of the terminal comes here, and is handed on once
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
