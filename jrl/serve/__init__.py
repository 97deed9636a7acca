"""Episodes that clients play over HTTP: a run that learns from them, and answers with its actions.

`python -m jrl.serve CONFIG` trains; `client.py` is what a simulator needs. `protocol` is what goes over the wire, `web`
carries it, `server` answers it; `table` knows the episodes, `columns` their rows, `inference` chooses actions, and
`source` makes rollouts of rows.
"""
