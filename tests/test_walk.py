"""How far it is from the command to PPO's gradient: what a reader has to open on the way."""

import traceback
from pathlib import Path

import pytest

import jrl
from jrl import train
from jrl.algos import ppo

PACKAGE = Path(jrl.__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "most"),
    [("envpool", 11), ("jax", 14)],
    ids=["main job", "one program"],
)
def test_few_frames_of_few_files_lead_to_the_gradient(backend, most, monkeypatch, tmp_path):
    """Programs are traced in a thread of their own: the frames are those of it, from the first of jrl to the loss."""
    stacks, loss = [], ppo.loss

    def watched(*args, **more):
        stacks.append([f for f in traceback.extract_stack() if PACKAGE in Path(f.filename).parents])
        return loss(*args, **more)

    monkeypatch.setattr(ppo, "loss", watched)
    sizes = ["--set=env.num_envs=2", "--set=rollout.length=16", "--set=network.hidden=[4]", "--stop=env_steps=32"]
    more = [f"--set=env.backend={backend}", "--set=run.log=[jsonl]", "--out", str(tmp_path / "run")]
    assert train.main([str(PACKAGE.parent / "configs" / "ppo.yaml"), *sizes, *more]) == 0
    stack = stacks[0]
    assert stack[-1].filename.endswith("minibatch.py")  # the loss is called by what takes its gradient
    assert len(stack) <= most
    assert len({f.filename for f in stack}) <= 8
