# %% [markdown]
# # Seeds, sweeps and honest comparison
#
# For people who want to know whether a change helps. The question here: which step size should PPO have on CartPole-v1
# if there are only 40,000 steps? The tutorial shows why one run cannot answer it, and what can.

# %%
import json
from pathlib import Path

import numpy as np

from jrl.plot import plot
from jrl.report.__main__ import main as report
from jrl.sweep.__main__ import main as sweep
from jrl.train import main as train

# %% [markdown]
# The commands of jrl are functions too. Their arguments are the words of the command line: the next cell is
# `python -m jrl.train ppo ... --seeds 8 --out runs/seeds` in a terminal.
#
# ## One setting, eight seeds
#
# With an environment in JAX, `--seeds 8` trains eight runs in one program. Each member is the same run as alone.

# %%
common = ["ppo", "--set", "env.backend=jax", "--stop", "env_steps=40000", "--stop", "episode/return=null"]
status = train([*common, "--set", "algo.lr=1e-3", "--seeds", "8", "--out", "runs/seeds"])

# %%
plot("runs/seeds")


# %%
def last_returns(directory):
    """Returns the mean return of the latest 100 episodes, at the end of each member."""
    rows = [path.read_text().splitlines()[-1] for path in sorted(Path(directory).glob("members/*/result.jsonl"))]
    return np.array([json.loads(row)["episode/return"] for row in rows])


found = last_returns("runs/seeds")
print("returns:", *found.round())
print(f"least {found.min():.0f}, mean {found.mean():.0f}, greatest {found.max():.0f}")

# %% [markdown]
# All eight have the same settings. The luckiest seed has a third more than the unluckiest. If two methods were measured
# with one seed each, this could be all that is between them.
#
# ## How many seeds?
#
# Draw groups of seeds from these eight, and look at how far the means of groups are apart:

# %%
rng = np.random.default_rng(0)
for count in (1, 2, 4, 8):
    means = rng.choice(found, (10_000, count)).mean(1)
    low, high = np.percentile(means, [2.5, 97.5])
    print(f"mean of {count}: 95 % of groups lie between {low:.0f} and {high:.0f}")

# %% [markdown]
# The width shrinks with the square root of the count. So a difference between two methods that is smaller than this
# width is no result. It also depends on the task: measure it for yours.
#
# ## Several settings
#
# A sweep trains each point with the same number of seeds. Floats such as `algo.lr` share one program.

# %%
status = sweep([*common, "--set", "algo.lr=log(1e-4,1e-2,3)", "--seeds", "5", "--out", "runs/sweep"])

# %% [markdown]
# ## The report
#
# `jrl.report` compares methods: runs that differ only in the seed are one method. It uses the interquartile mean (IQM),
# the mean of the middle half, which a single lucky run cannot move, and bootstrap intervals.

# %%
status = report(["runs/sweep", "--out", "report"])

# %%
found = json.loads(Path("report/report.json").read_text())
for row in found["per_task"]:
    iqm = row["iqm"]
    print(f"{row['method']}: IQM {iqm['value']:.0f}, 95 % interval {iqm['low']:.0f} to {iqm['high']:.0f}")
for row in found["improvement"]:
    print(f"probability that {row['method']} beats {row['over']}: {row['value']:.2f}")

# %%
plot("runs/sweep")

# %% [markdown]
# `report/index.html` is the same as a page, with curves and every run. Here the intervals lie apart, so five seeds are
# enough. Intervals that overlap would ask for more seeds, and not for another look at the same ones.
#
# ## What makes a comparison honest
#
# * **Every method gets the same effort.** Three step sizes for one method and thirty for another compare the effort.
# * **The score is fixed before the runs**: here the last 100 episodes, not the best moment of a run. A maximum of many
#   noisy numbers is luck.
# * **The best point of a sweep is lucky, too.** Its seeds did well, so it was chosen. Train it again with new seeds,
#   `--set run.seed=100 --seeds 5`, and report these.
# * **Say what you measured**: the number of seeds, the number of settings that you tried, the budget, and the failures.
# * **One task is one task.** The report says so at its top. A table over several tasks needs
#   [normalised scores](../reports.md#over-tasks).
#
# ## Next
#
# * Search a space instead of a grid, stop bad points early: [sweeps](../sweeps.md).
# * Evaluations with the best actions instead of training returns: [evaluation](../evaluation.md).
# * What the report computes, and runs of other libraries in it: [reports](../reports.md).
