"""Small populations, and what they leave on disk."""

from jrl.metrics import loggers

SMALL = [
    "ppo", "--env=CartPole-v1", "--set=env.backend=jax", "--set=env.num_envs=2", "--set=network.hidden=[4]",
    "--set=rollout.length=8", "--set=algo.num_epochs=1", "--set=algo.num_minibatches=1", "--set=run.log=[jsonl]",
    "--set=run.report_every=16", "--set=checkpoint.keep_last=99", "--set=run.compile_cache=false",
]  # fmt: skip


def rows(directory):
    """Returns the result rows of a run without columns that differ between runs."""
    varying = ("time", "perf/")
    return [
        {k: v for k, v in row.items() if not k.startswith(varying)}
        for row in loggers.read_rows(directory / "result.jsonl")
    ]
