"""Commands of `python -m jrl.data`: a module each, with `parser()` and `run(args) -> exit status`.

They import nothing slow before they run; `paths` is what several of them take and write.
"""

# name -> what it does, in the order of the help
NAMES = {
    "record": "play trained policies, random actions or a mix of them into a data set",
    "inspect": "summarise a data set, and list its faults, each with a mend",
    "convert": "write data sets in another format",
    "split": "divide a data set into one to train on and one to validate with",
    "merge": "write several data sets as one",
    "estimate": "estimate what a trained policy would earn, by episodes that others played",
}
# those whose modules stand above this room, which names them and does not import them
ABOVE = {"record": "jrl.run.record_data", "estimate": "jrl.run.estimate_data"}
