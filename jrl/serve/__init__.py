"""Clients that play episodes over HTTP: the server's policies act, and a run learns from the episodes.

`python -m jrl.serve CONFIG` trains (`clients`, `client_source`); with `--no-learn` it serves `trained_policies`.
`http_server` runs uvicorn with the limits of the config, and `server` answers the routes of `openapi`.
`episode_table` holds the episodes, `row_rings` their rows, and `inference` chooses actions. A simulator needs
`client.py` only.
"""
