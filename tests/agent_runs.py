"""Runs with several agents: trained, and cut off and resumed."""

import json
import shutil

from jrl import train
from jrl.run.session import Session


def trained(cfg, calls=3):
    """The States after so many iterations, and the last row."""
    with Session(cfg, endless=True) as session:
        session.start()
        for _ in range(calls):
            session.reporter.add(session.advance())
        session.reporter.flush()
        return session.learner_state_of_all(), session.reporter.row


def whole_and_resumed(directory, data, *, cut, steps):
    """The last result rows of a run of so many `steps`, and of the same one resumed from its checkpoint at `cut`.

    Their run directories are `whole` and `cut`: the second is the first as if killed after that checkpoint.
    """
    whole, half, path = directory / "whole", directory / "cut", directory / "run.yaml"
    path.write_text(json.dumps(data))
    options = [f"--stop=env_steps={steps}", f"--set=checkpoint.every={cut}"]
    assert train.main([str(path), *options, f"--out={whole}"]) == 0
    shutil.copytree(whole, half)
    kept, *later = sorted((half / "checkpoints").iterdir(), key=lambda found: int(found.name))
    assert later
    for found in later:
        shutil.rmtree(found)
    assert train.main([f"--resume={half}", *options]) == 0
    assert kept != max((half / "checkpoints").iterdir(), key=lambda found: int(found.name))  # it went on
    return [json.loads((out / "result.jsonl").read_text().splitlines()[-1]) for out in (whole, half)]


def without(row, *parts):
    """What a row says under names that have none of these parts."""
    return {name: value for name, value in row.items() if not any(part in name for part in parts)}
