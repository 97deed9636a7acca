"""Episodes that clients play over HTTP: a run that learns from them and answers with its actions.

`python -m jrl.serve CONFIG` trains; with `--no-learn` it serves trained policies (`policies`). `client.py` is what a
simulator needs. `http_server` is uvicorn with the limits of the config, `server` answers the routes that `openapi`
lists, `table` has the episodes, `inference` chooses actions, `source` makes rollouts, and `clients` puts all of it
together for a run.
"""
