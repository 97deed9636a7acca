"""Episodes that clients play over HTTP: a run that learns from them, and answers with its actions.

`python -m jrl.serve CONFIG` trains, with `--no-learn` it serves trained policies (`policies`); `client.py` is what a
simulator needs. `protocol` is what goes over the wire, `web` carries it, `server` answers it; `table` knows the
episodes, `columns` their rows, `inference` chooses actions, `source` makes rollouts of rows, and `clients` puts them
together for a run.
"""
