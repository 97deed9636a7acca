"""A trained policy as files that run without jrl: `python -m jrl.export CHECKPOINT --format npz --out DIR`.

`program` traces what the policy does with an observation to a list of primitive operations, with every parameter a
constant; `formats` writes that list as npz, StableHLO or ONNX. `policy.py` and `interpreter.py` are not used by jrl:
they are copied beside what was exported.
"""
