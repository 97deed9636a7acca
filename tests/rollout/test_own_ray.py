"""A Ray that a program begins itself: who can reach it and what ends it; and what Ray says, in words."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import descendants, gone

from jrl.rollout.ray_cluster import in_words


def test_what_ray_says_of_a_dead_actor_in_words():
    died = "The actor died unexpectedly before finishing this task.\n\tclass_name: Host\n\tpid: 77\n\tip: 10.0.0.3\n"
    for reason, words in (
        (
            "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
            "... (1) The process is killed by SIGKILL by OOM killer due to high memory usage. (2) ray stop",
            "its process 77 on 10.0.0.3 has ended: it was killed",
        ),
        (
            "The actor died because its node has died. Node Id: 5eaf3\n\tthe actor's node was terminated unexpectedly",
            "the machine of its process 77 on 10.0.0.3 has left the cluster: it is down, or cannot be reached",
        ),
        ("Something else.", "Something else."),
    ):
        assert words in in_words(died + reason)


@pytest.mark.slow
def test_an_interrupted_program_ends_the_ray_that_it_began():
    folder = Path(__file__).parent
    program = subprocess.Popen(
        [sys.executable, str(folder / "ray_driver.py")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        told = json.loads(program.stdout.readline())
        assert told["sigterm_kept"]
        assert not {"RAY_process_group_cleanup_enabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"} & {*told["environ"]}
        # the GCS, the raylet, runners and this program: none of them can be reached from other machines
        assert {"gcs_server", "raylet"} <= {name for name, _ in told["listening"]}
        assert {ip.removeprefix("::ffff:") for _, ip in told["listening"]} == {"127.0.0.1"}
        processes = descendants(program.pid)
        assert set(told["pids"]) <= processes
        os.killpg(program.pid, signal.SIGINT)
        out, err = program.communicate(timeout=90)
        assert program.returncode == 0, err
        assert out == "closed\n"
        assert "Traceback" not in err
        assert gone(*processes, seconds=30.0)
    finally:
        program.kill()
        program.communicate()
