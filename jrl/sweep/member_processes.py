"""Members of a population that train in one process each, because they cannot be one program (EnvPool, Gymnasium)."""

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
from jrl.sweep.members import MemberSpec, Record, is_complete, read_steps

_POLL_S = 0.2  # time between two checks of the processes
_CLOCK_TOLERANCE_S = 1.0  # maximum lag of the file system's clock
_CONFIGS = "configs"


def train_processes(
    members: Sequence[MemberSpec],
    record: Record,
    processes: int,
    interrupted: interruption.Signals,
    pause: float = math.inf,
) -> dict[str, str]:
    """Trains each member by `python -m jrl.train`; members with a checkpoint resume.

    `console.txt` in a member's directory holds the output of its process.

    Args:
      members: members to train.
      record: record of the population, which gets the members that end.
      processes: number of processes at once.
      interrupted: signals that end the training.
      pause: environment steps at which members save a checkpoint and pause.
    Returns:
      Member name -> reason, for members that ended: `ended`, `complete`, a reason from the record, `not finite: PATH`,
      `failed: status N`, `interrupted`.
    """
    ended = {member.name: "complete" for member in members if is_complete(member)}
    ended |= {member.name: why for member in members if (why := record.find_end_reason(member))}
    paused = {member.name for member in members if member.name not in ended and read_steps(member) >= pause}
    waiting = [member for member in members if member.name not in ended and member.name not in paused]
    running, by_name = dict[str, subprocess.Popen](), {member.name: member for member in members}
    start_times: dict[str, float] = {}
    print(f"{counted(len(members), 'member')}, {processes} at once, each in its own process")
    try:
        while waiting or running:
            while waiting and len(running) < processes and not interrupted:
                member = waiting.pop(0)
                start_times[member.name] = time.time()
                running[member.name] = _start_process(member, record.directory, pause)
            for name, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[name]
                member = by_name[name]
                if process.returncode and (bundle := _find_nonfinite_bundle(member, start_times[name])):
                    ended[name] = f"{interruption.NOT_FINITE}: {bundle}"
                    record.add_end(member, ended[name], read_steps(member))
                elif process.returncode:
                    ended[name] = f"failed: status {process.returncode}"
                elif not is_complete(member) and read_steps(member) >= pause:
                    paused.add(name)
                else:
                    ended[name] = "ended"
                    record.add_end(member, "ended", read_steps(member))
                outcome = ended.get(name, f"at {pause:,.0f} steps")
                print(f"{name}: {outcome}  ({len(ended) + len(paused)} of {len(members)})", flush=True)
            if interrupted:
                for process in running.values():
                    process.terminate()  # the process saves a checkpoint
                for process in running.values():
                    process.wait()
                return {**dict.fromkeys((m.name for m in members), "interrupted"), **ended}
            time.sleep(_POLL_S)
    finally:
        for process in running.values():
            process.kill()
    return ended


def _find_nonfinite_bundle(member: MemberSpec, since: float) -> Path | None:
    bundles = (member.directory / "nonfinite").glob("*/")
    return next((path for path in bundles if path.stat().st_mtime >= since - _CLOCK_TOLERANCE_S), None)


def _start_process(member: MemberSpec, directory: Path, pause: float) -> subprocess.Popen:
    path = directory / _CONFIGS / f"{member.name}.yaml"
    path.parent.mkdir(exist_ok=True)
    files.replace(path, config.to_yaml(member.config))
    member.directory.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "jrl.train", str(path), "--out", str(member.directory), "--resume", "auto"]
    command += [] if pause == math.inf else ["--until", str(int(pause))]
    command += ["--rows", json.dumps(member.row_extras)] if member.row_extras else []
    with (member.directory / "console.txt").open("a") as out:
        # new session: a terminal's Ctrl-C reaches this process only, which passes it on once
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
