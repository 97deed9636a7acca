# %% [markdown]
# # An external simulator
#
# For simulators, games and devices that jrl cannot step: they run in another process, on another machine, in another
# language, and ask for actions when they need them. A server of jrl answers over HTTP and learns from the episodes. It
# needs `pip install "jrl[serve]"`; the client needs only numpy. All calls and keys: [clients that play](../serving.md).

# %%
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import gymnasium
import numpy as np

from jrl.plot import plot
from jrl.serve.client import PolicyClient

# %% [markdown]
# ## Start the server
#
# The server has to know the spaces of observations and actions, nothing else of the simulator. In a terminal this is
# `python -m jrl.serve ppo --set ...`; here the notebook starts the same command. `env.num_envs` is the largest
# number of episodes at a time: eight simulators could play. One does here.

# %%
with socket.socket() as any_free:
    any_free.bind(("127.0.0.1", 0))
    port = any_free.getsockname()[1]


def serve(log, *words):
    """Starts a server; its output goes to a file."""
    command = [sys.executable, "-u", "-m", "jrl.serve", *words, "--set", f"external.port={port}"]
    return subprocess.Popen(command, stdout=open(log, "w"), stderr=subprocess.STDOUT)


server = serve(
    "learning.txt",
    *["ppo", "--set", "external.observation={box: [4]}", "--set", "external.action={discrete: 2}"],
    *["--set", "env.num_envs=8", "--set", "rollout.length=64", "--set", "algo.lr=1e-3"],
    *["--stop", "env_steps=1000000", "--out", "runs/served"],
)
address = f"http://127.0.0.1:{port}"

# %% [markdown]
# ## The simulator's side
#
# Gymnasium's CartPole-v1 stands for the simulator. The simulator has the loop and jrl answers: this is the reverse of
# an environment. Four calls are enough. They wait until the server is there, and a repeated request counts once.

# %%
client, simulator = PolicyClient(address), gymnasium.make("CartPole-v1")

episode, (obs, _), over = client.start_episode(), simulator.reset(seed=0), False
start, steps = time.perf_counter(), 0
while not over:
    action = client.get_action(episode, obs)
    obs, reward, terminated, truncated, _ = simulator.step(int(action))
    client.log_returns(episode, float(reward))
    over, steps = terminated or truncated, steps + 1
print(client.end_episode(episode, obs, truncated=truncated))
print(f"{steps / (time.perf_counter() - start):.0f} steps/s")
client.close()

# %% [markdown]
# ## Faster: act in the client
#
# Each action was a request. With `inference_mode="local"` the client downloads the weights, chooses actions in its own
# process with numpy, and sends many steps in one request. The calls are the same. Steps of weights that are too old are
# dropped by the server, so learning stays correct.

# %%
client, finished = PolicyClient(address, inference_mode="local"), []
start, steps = time.perf_counter(), 0
while steps < 30_000:
    episode, (obs, _), over, total = client.start_episode(), simulator.reset(), False, 0.0
    while not over:
        obs, reward, terminated, truncated, _ = simulator.step(int(client.get_action(episode, obs)))
        client.log_returns(episode, float(reward))
        over, steps, total = terminated or truncated, steps + 1, total + float(reward)
    client.end_episode(episode, obs, truncated=truncated)
    finished.append(total)
print(f"{len(finished)} episodes, {steps / (time.perf_counter() - start):,.0f} steps/s with learning")
print("mean return of the first 20 episodes:", np.mean(finished[:20]))
print("mean return of the last 20 episodes:", np.mean(finished[-20:]))
client.close()

# %% [markdown]
# ## Stop the server
#
# Ctrl-C saves a checkpoint and ends the server. If it is started again with `--resume auto`, it continues, and clients
# that were waiting go on with new episodes.

# %%
server.send_signal(signal.SIGINT)
print("exit status:", server.wait(60))
print(*Path("learning.txt").read_text().replace(os.getcwd() + "/", "").splitlines()[-6:], sep="\n")

# %%
plot("runs/served")

# %% [markdown]
# The run is an ordinary run, with the same files, criteria, evaluation and export as any other.
#
# ## Serve the trained policy
#
# `--no-learn` serves the best actions of a run. Any program that speaks HTTP can ask:

# %%
import json
import urllib.request

server = serve("serving.txt", "runs/served", "--no-learn")
client = PolicyClient(address)
episode, (obs, _), over, total = client.start_episode(), simulator.reset(seed=1), False, 0.0
while not over:
    obs, reward, terminated, truncated, _ = simulator.step(int(client.get_action(episode, obs)))
    total, over = total + float(reward), terminated or truncated
client.end_episode(episode, obs, truncated=truncated)
client.close()
print(f"return of the best actions: {total:.0f}")

body = json.dumps({"observation": [0.0, 0.1, 0.0, -0.1]}).encode()
request = urllib.request.Request(f"{address}/v1/action", body, {"Content-Type": "application/json"})
print(urllib.request.urlopen(request).read().decode())
server.send_signal(signal.SIGINT)
print("exit status:", server.wait(60))

# %% [markdown]
# ## Next
#
# * In a browser: `jrl/serve/client.js` has the same calls, and `examples/serve_cartpole.html` plays with them.
# * Other languages: [routes and bodies](../serving.md#over-the-wire), or `/openapi.json` of the server.
# * Other hosts need a token and a certificate: [the run](../serving.md#the-run).
