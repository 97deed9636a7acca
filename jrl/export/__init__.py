"""A trained policy as files that run without jrl: `python -m jrl.export CHECKPOINT --format npz --out DIR`.

`traced_program` traces a policy to a list of primitive operations with constant parameters. `formats` writes the list
as npz, StableHLO, ONNX or C. jrl copies `policy.py` and `interpreter.py` beside the exported files.
"""
