"""python -m jrl.record: the frames of the episodes in a file, their returns on the screen."""

import jax
import numpy as np
import pytest
from PIL import Image
from saved import save

from jrl import config, record
from jrl.envs import render
from jrl.errors import InputError
from jrl.play import video
from jrl.run import build
from jrl.types import Box, Discrete, EnvSpec

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:gymnasium", "ignore:.*fork.*")


SPEC = EnvSpec(Box((1,), "float32", 0.0, 10.0), Discrete(2), 1)


@pytest.fixture(scope="module")
def painted(tmp_path_factory):
    path = tmp_path_factory.mktemp("painted")
    save(path, "ppo", SPEC, "run.compile_cache=false", env="painted:Painted")
    return path


@pytest.fixture(autouse=True)
def no_compile_cache_of_the_user(monkeypatch):
    from jrl.run import build

    monkeypatch.setattr(build, "enable_compile_cache", lambda: None)


def reds(path):
    """(red of each frame, its duration in ms)."""
    with Image.open(path) as image:
        found = []
        for i in range(image.n_frames):
            image.seek(i)
            found.append((image.convert("RGB").getpixel((1, 1))[0], image.info["duration"]))
    return found


def test_a_gif_of_two_episodes(painted, tmp_path, capsys):
    out = tmp_path / "new" / "video.gif"
    assert record.main([str(painted), "--out", str(out), "--episodes", "2"]) == 0
    assert reds(out) == [(red, 40) for red in [0, 50, 100, 150, 200] * 2]
    assert capsys.readouterr().out.splitlines() == [
        "episode 1: return 6, 4 steps",
        "episode 2: return 6, 4 steps",
        f"wrote {out}: 10 frames, 25 per second, drawn by Gymnasium",
    ]


def test_without_an_encoder_a_gif_is_asked_for(painted, tmp_path, capsys, monkeypatch):
    def nothing():
        raise RuntimeError("No ffmpeg exe could be found.")

    monkeypatch.setattr("imageio_ffmpeg.get_ffmpeg_exe", nothing)
    assert record.main([str(painted), "--out", str(tmp_path / "video.mp4")]) == 2
    said = capsys.readouterr().err
    assert "video.mp4: there is no encoder for mp4 (No ffmpeg exe could be found.)" in said and "ends in .gif" in said
    command = [str(painted), "--out", str(tmp_path / "video.gif"), "--fps", "10", "--max-steps", "2"]
    assert record.main(command) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["video.gif"]
    assert reds(tmp_path / "video.gif") == [(0, 100), (50, 100), (100, 100)]
    out = capsys.readouterr().out
    assert "episode 1: return 3, 2 steps, cut by --max-steps" in out
    assert "video.gif: 3 frames, 10 per second, drawn by Gymnasium" in out


def pictures(path):
    """(frames per second, frames) of an mp4."""
    import imageio_ffmpeg

    reader = imageio_ffmpeg.read_frames(str(path))
    meta = next(reader)
    width, height = meta["size"]
    return meta["fps"], [np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in reader]


def test_mp4(painted, tmp_path, capsys):
    out = tmp_path / "video.mp4"
    assert record.main([str(painted), "--out", str(out)]) == 0
    assert f"wrote {out}: 5 frames" in capsys.readouterr().out
    assert [p.name for p in tmp_path.iterdir()] == ["video.mp4"]
    fps, frames = pictures(out)
    assert fps == 25
    assert [f.shape for f in frames] == [(32, 40, 3)] * 5  # an odd side gets one more row
    np.testing.assert_allclose([f[15, 20, 0] for f in frames], [0, 50, 100, 150, 200], atol=12)


def test_an_encoder_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    encoder = tmp_path / "encoder"
    encoder.write_text("#!/bin/sh\nhead -c 100 > /dev/null\neval last=\\${$#}\necho half > ${last#file:}\n"
                       "echo No space left >&2\nexit $STATUS\n")  # fmt: skip
    encoder.chmod(0o755)
    monkeypatch.setattr("imageio_ffmpeg.get_ffmpeg_exe", lambda: str(encoder))
    out = tmp_path / "video.mp4"
    out.write_text("before")
    frames = [np.zeros((64, 64, 3), np.uint8)] * 40
    monkeypatch.setenv("STATUS", "3")
    with pytest.raises(InputError, match=r"--out: cannot write to .*video\.mp4: the encoder failed: No space left: "):
        video.write_video(out, frames, 30.0, key="--out")
    with pytest.raises(OSError, match="the encoder failed: No space left"):
        video.write_video(out, frames, 30.0)
    assert out.read_text() == "before" and sorted(p.name for p in tmp_path.iterdir()) == ["encoder", "video.mp4"]
    monkeypatch.setenv("STATUS", "0")
    video.write_video(out, frames[:1], 30.0)
    assert out.read_text() == "half\n"


COLOURS = np.arange(2 * 4 * 3, dtype=np.uint8).reshape(2, 4, 3) * 10


def test_frames_of_other_kinds_are_converted():
    grey = np.repeat(COLOURS[..., 1:2], 3, 2)
    for frame, expected in (
        (np.dstack([COLOURS, COLOURS[..., :1]]), COLOURS),  # with transparency
        (COLOURS / 255, COLOURS),
        (COLOURS.astype(np.float32), COLOURS),  # floats up to 255
        (COLOURS[..., 1], grey),
        (COLOURS[..., 1:2], grey),
        (COLOURS.astype(np.int64), COLOURS),
        (COLOURS.tolist(), COLOURS),
        (COLOURS > 100, (COLOURS > 100) * 255),
        (np.full((2, 4, 3), np.nan), np.zeros((2, 4, 3))),
    ):
        found = render.Frames().picture(frame)
        assert found.dtype == np.uint8
        np.testing.assert_array_equal(found, expected)


def test_a_frame_that_is_no_picture_is_named_with_shape_and_dtype():
    for frame, said in (
        (None, "frame 2 is None:"),
        ("x", "frame 2 is str"),
        (np.zeros((3, 2, 5), np.uint8), "frame 2 is ndarray [3, 2, 5] of uint8:"),
        (COLOURS[:0], "[0, 4, 3] of uint8"),
        (COLOURS[0, 0], "[3] of uint8"),
        (COLOURS.astype(int) * 300, "of int64 from 0 to 69000"),
        ([[1], [1, 2]], "frame 2 is list"),
        (COLOURS.astype(object), "of object"),
    ):
        frames = render.Frames()
        frames.picture(COLOURS)
        with pytest.raises(InputError) as e:
            frames.picture(frame)
        assert said in str(e.value) and "return a picture" in str(e.value)


def test_frames_that_change_their_size_and_metadata_of_any_kind(tmp_path):
    frames = [COLOURS, COLOURS[:1, :1], np.full((9, 5, 3), 200, np.uint8)]
    for name in ("a.gif", "a.mp4"):
        assert video.write_video(tmp_path / name, iter(frames), 10.0) == 3
    fps = [render.metadata_fps(x) for x in (None, {}, {"render_fps": None}, [1], {"render_fps": np.float32(25)})]
    assert fps == [30.0, 30.0, 30.0, 30.0, 25.0]
    for bad in ("fast", 0, -1, float("nan"), float("inf"), 10**400, [], np.ones(3)):
        assert render.metadata_fps({"render_fps": bad}) == 30.0
    assert render.metadata_fps({"render_fps": "25"}) == 25.0


# ---------------------------------------------------------------- of a run under way


def videos(directory, *overrides, episodes=2):
    cfg = config.load(None, ["network.hidden=[8]", *overrides], algo="ppo", env="painted:Painted", stop=["env_steps=1"])
    algo = build.algorithm(cfg, SPEC)
    made = video.Videos(cfg, directory, episodes=episodes)
    try:
        made.prepare(SPEC)
    except BaseException:
        made.close()
        raise
    return made, jax.jit(lambda key: algo.actor(algo.init(key)))(jax.random.key(0))


def test_videos_of_weights_that_the_learner_takes_back(tmp_path):
    made, actor = videos(tmp_path / "videos")
    made.begin(actor, 128)
    jax.tree.map(lambda x: x.delete(), actor)  # as the learner's next update does
    made.close()
    assert [p.name for p in (tmp_path / "videos").iterdir()] == ["128.mp4"]
    _, frames = pictures(tmp_path / "videos" / "128.mp4")
    np.testing.assert_allclose([f[15, 20, 0] for f in frames], [0, 50, 100, 150, 200] * 2, atol=12)


def test_a_video_that_fails_leaves_nothing_but_a_warning(tmp_path, monkeypatch, caplog):
    made, actor = videos(tmp_path / "videos", "env.horizon=2")
    drawn = made._scene.env.render
    pictures_left = [drawn, drawn]
    monkeypatch.setattr(made._scene.env, "render", lambda: pictures_left.pop()(), raising=False)
    made.begin(actor, 7)
    made._under_way.result()
    assert "7.mp4 could not be written: IndexError" in caplog.text and list((tmp_path / "videos").iterdir()) == []
    monkeypatch.undo()
    made.begin(actor, 8)  # the next is written all the same
    made.close()
    assert [p.name for p in (tmp_path / "videos").iterdir()] == ["8.mp4"]
    assert len(pictures(tmp_path / "videos" / "8.mp4")[1]) == 6  # two episodes of two steps, by env.horizon


def test_what_cannot_be_recorded_is_told_before_training(tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"evaluation\.record: env painted:Painted cannot be drawn: gymnasium: "):
        videos(tmp_path, "env.options={draws: false}")
    monkeypatch.setattr("imageio_ffmpeg.get_ffmpeg_exe", lambda: 1 / 0)
    with pytest.raises(InputError, match=r"evaluation\.record: there is no encoder for mp4"):
        videos(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_environment_of_envpool(tmp_path, capsys):
    from jrl import envs

    env = envs.make("CartPole-v1", num_envs=1, host=True)
    env.close()
    save(tmp_path, "dqn", env.spec)
    outs = []
    for name in ("a.gif", "b.gif"):
        assert record.main([str(tmp_path), "--out", str(tmp_path / name), "--seed", "4"]) == 0
        outs.append(capsys.readouterr().out)
    first, second = (out.splitlines() for out in outs)
    assert first[0] == second[0]  # the same seed, the same episode
    steps = int(first[0].split()[-2])
    assert first[0] == f"episode 1: return {steps}, {steps} steps"
    assert first[1].endswith(f"a.gif: {steps + 1} frames, 50 per second, drawn by EnvPool")


def test_a_gif_shows_50_frames_per_second_at_most(tmp_path):
    frames = (np.full((4, 4, 3), 20 * i, np.uint8) for i in range(10))
    assert video._write_gif(tmp_path / "a.gif", frames, fps=100) == 6
    assert reds(tmp_path / "a.gif") == [(20 * i, 20) for i in (0, 2, 4, 6, 8, 9)]


def test_bad_input_exits_with_2(painted, tmp_path, capsys):
    for arguments, message in (
        (["--out", "video.avi"], "video.avi: expected a name that ends in .mp4 or .gif"),
        (["--episodes", "0"], "--episodes: expected more than 0, got 0"),
        (["--max-steps", "-1"], "--max-steps: expected more than 0, got -1"),
        (["--fps", "nan"], "--fps: expected more than 0, got nan"),
        (["--fps", "1e9"], "--fps: expected a number in [0.01, 1000], got 1e+09"),
        (["--out", "/proc/x/video.gif"], "--out: cannot write to /proc/x/video.gif: No such file"),
        (["--best", "--out", f"{tmp_path}/a.gif"], "has the metric of its checkpoint.keep_best_by"),
    ):
        assert record.main([str(painted), *arguments]) == 2
        assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_drawn_exits_with_2(tmp_path, capsys):
    save(tmp_path / "run", "ppo", EnvSpec(Box((2,)), Discrete(2), 1), env="StatelessCartPole-v1")
    assert record.main([str(tmp_path / "run"), "--out", str(tmp_path / "a.gif")]) == 2
    assert capsys.readouterr().err.startswith("error: env StatelessCartPole-v1 cannot be drawn")
    assert not (tmp_path / "a.gif").exists()
