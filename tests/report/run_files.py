"""Run directories as training leaves them, of given numbers."""

import json
from pathlib import Path

from jrl.fields import schema


def run(
    directory: Path, seed: int, values, *, lr=1e-3, env="CartPole-v1", algo="ppo", budget=300, key="evaluation/return",
    **more,
) -> Path:  # fmt: skip
    """A run with a row each 100 steps; `more` are further keys of its config, with _ for dots."""
    directory.mkdir(parents=True)
    config = {
        "algo": {"name": algo, "lr": lr}, "env": {"id": env}, "stop": {"env_steps": budget},
        "run": {"seed": seed, "out": str(directory), "smoothing_episodes": 10},
    }  # fmt: skip
    config["algo"] |= more
    (directory / "config.yaml").write_text(schema.dump(config))
    lines = [
        {"env_steps": 100 * (i + 1), "updates": 10 * (i + 1), "time_s": 0.5 * (i + 1), key: value, "loss": value / 7}
        for i, value in enumerate(values)
    ]
    if key.startswith("evaluation/"):
        lines = [{**line, "evaluation/weights_version": i} for i, line in enumerate(lines)]
    (directory / "result.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    machine = {"cpu": {"model": "a CPU", "count": 2, "usable": 2}, "devices": ["cpu:0"]}
    env_json = {**machine, "git": {"commit": "0123abc", "dirty": False}, "versions": {"jrl": "0.1.0"}}
    (directory / "env.json").write_text(json.dumps({**env_json, "command": f"python -m jrl.train {algo}"}))
    return directory


def sweep(directory: Path, lengths=(1, 1, 3), copies=(), **more) -> Path:
    """A sweep of members that a scheduler has stopped where they have fewer than 3 rows, or that are copies."""
    for i, count in enumerate(lengths):
        values = [10.0 * (len(lengths) - i) if step == 0 else 100.0 * (i + 1) + step for step in range(count)]
        run(directory / "members" / f"0{i}", seed=0, values=values, lr=10.0 ** -(i + 1), **more)
    stopped = [
        {"round": 0, "at": 100 * at, "stopped": [f"0{i}" for i, count in enumerate(lengths) if count == at]}
        for at in (1, 2)
    ]
    copied = [{"round": 0, "at": 100, "copies": [{"member": to, "source": of, "changed": {}}]} for to, of in copies]
    kept = {"members": [{} for _ in lengths], "sweep": {}, "rounds": [len(lengths)], "decisions": stopped + copied}
    (directory / "population.json").write_text(json.dumps(kept))
    return directory
