"""Data sets: episodes on disk and in memory, whoever wrote them.

    store = data.read("runs/pendulum-mixed")           # whatever format: data.formats
    store.num_episodes, store.returns().mean()
    data.write(store, "out/", format="minari")

An EpisodeStore (`store`) holds whole episodes in numpy arrays; `formats` has a module for each kind of file.
"""

from jrl.data.formats import NAMES as NAMES
from jrl.data.formats import read as read
from jrl.data.formats import write as write
from jrl.data.store import Episode as Episode
from jrl.data.store import EpisodeStore as EpisodeStore
from jrl.data.store import concatenated as concatenated
from jrl.data.store import of_episodes as of_episodes
