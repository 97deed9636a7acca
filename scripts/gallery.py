"""The gallery of environments, docs/gallery.md, from the table below.

    python scripts/gallery.py --write              # the page
    python scripts/gallery.py --draw [ID ...]      # pictures in docs/images/gallery, too; without an id all

Pictures are drawn as `python -m jrl.record` draws, or are reduced pictures of docs/images.
tests/test_site.py compares the page with the table, and a slow test the table's spaces with the environments.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "gallery.md"
PICTURES = ROOT / "docs" / "images" / "gallery"
_SIZE = (160, 120)  # maximum pixels
_CONFIGS = 3  # shown configs of an id


class Row(NamedTuple):
    """An environment.

    Attributes:
      task: the task in a few words.
      observation, action: `describe` of its spaces.
      picture: file of docs/images to reduce; "": the environment is drawn.
    """

    id: str
    task: str
    observation: str
    action: str
    picture: str = ""


# heading -> (link below it, rows)
TABLE: dict[str, tuple[str, tuple[Row, ...]]] = {
    "Classic control": (
        "In JAX, inside the training program; EnvPool has them, too: [environments](environments.md).",
        (
            Row("CartPole-v1", "balance a pole on a cart", "[4]", "2 choices"),
            Row("Acrobot-v1", "swing two links up", "[6]", "3 choices"),
            Row("MountainCar-v0", "leave a valley with a weak engine", "[2]", "3 choices"),
            Row("MountainCarContinuous-v0", "the same with continuous force", "[2]", "Box [1]"),
            Row("Pendulum-v1", "swing a pendulum up and hold it", "[3]", "Box [1]"),
        ),
    ),
    "Environments of jrl": (
        "Small tasks in JAX; those for masks, memory and goals have no pictures: [environments](environments.md).",
        (
            Row("Catch-v0", "catch the falling ball", "[10, 5]", "3 choices"),
        ),
    ),
    "Several agents": (
        "In JAX, too: [several agents](multi-agent.md), [tutorial](tutorials/several_agents.md).",
        (
            Row("MultiAgentCartPole-v1", "each agent balances a pole of its own", "[4]", "2 choices"),
            Row("MultiAgentPendulum-v1", "each agent swings a pendulum of its own", "[3]", "Box [1]"),
            Row("SimpleSpread-v0", "three agents cover three landmarks", "[18]", "5 choices"),
            Row("TicTacToe-v0", "three in a row", "action_mask [10], obs [19]", "10 choices"),
            Row("ConnectFour-v0", "four in a row", "action_mask [8], obs [85]", "8 choices"),
        ),
    ),
    "Box2D": (
        "By EnvPool: [environments](environments.md).",
        (
            Row("LunarLander-v3", "land between two flags", "[8]", "4 choices"),
            Row("BipedalWalker-v3", "walk over rough ground", "[24]", "Box [4]"),
        ),
    ),
    "MuJoCo": (
        "By EnvPool, with the tasks of Gymnasium and of dm_control: [environments](environments.md).",
        (
            Row("HalfCheetah-v4", "run", "[17]", "Box [6]"),
            Row("Swimmer-v4", "swim", "[8]", "Box [2]"),
        ),
    ),
    "Atari": (
        "By EnvPool. Observations are stacks of four frames: [environments](environments.md).",
        (
            Row("Pong-v5", "table tennis", "[4, 84, 84] uint8", "6 choices"),
            Row("Breakout-v5", "break a wall with a ball", "[4, 84, 84] uint8", "4 choices"),
        ),
    ),
    "MiniGrid and MinAtar": (
        "Grid worlds of EnvPool, and small Atari games of gymnax: [suites](suites.md).",
        (
            Row(
                "MiniGrid-DoorKey-5x5-v0", "find the key, open the door",
                "direction of 4, image [7, 7, 3] uint8, mission [96] uint8", "7 choices",
            ),
            Row("gymnax:Breakout-MinAtar", "break a wall with a ball", "[10, 10, 4]", "3 choices"),
        ),
    ),
    "Suites in JAX": (
        "Packages of their own, by name: [suites](suites.md).",
        (
            Row(
                "craftax:Craftax-Classic-Symbolic-v1", "survive, collect, craft and fight", "[1345]", "17 choices",
                "suite-craftax.png",
            ),
            Row("playground:CartpoleBalance", "balance a pole, by MJX", "[5]", "Box [1]", "suite-playground.png"),
            Row(
                "jumanji:Game2048-v1", "add equal tiles", "action_mask [4], board [4, 4]", "4 choices",
                "suite-jumanji.png",
            ),
            Row("xminigrid:MiniGrid-Empty-8x8", "go to a goal", "[7, 7, 2] int32", "6 choices", "suite-xminigrid.png"),
            Row("navix:Navix-Empty-8x8-v0", "go to the goal", "[8, 8, 3] uint8", "7 choices", "suite-navix.png"),
            Row("pgx:connect_four", "four in a row", "action_mask [8], obs [6, 7, 2]", "8 choices", "suite-pgx.svg"),
        ),
    ),
}  # fmt: skip


def rows() -> list[Row]:
    """Returns the rows of all sections."""
    return [row for _, section in TABLE.values() for row in section]


def describe(space: Any, *, is_action: bool = False) -> str:
    """Returns a space of `jrl.types` in a few words."""
    kind = type(space).__name__
    if kind == "Dict":
        return ", ".join(f"{name} {describe(part).replace(' choices', '')}" for name, part in space.items)
    if kind == "Discrete":
        return f"{space.n} choices" if is_action else f"of {space.n}"
    shape = f"[{', '.join(map(str, space.shape))}]"
    if is_action:
        return f"{kind} {shape}"
    return shape if space.dtype in ("float32", "int8") else f"{shape} {space.dtype}"


def configs(id: str) -> list[str]:
    """Returns the names of shipped configs that train on an environment: of common algorithms first."""
    found = []
    for path in (ROOT / "configs").glob("*.yaml"):
        env = (yaml.load(path.read_text(encoding="utf-8"), yaml.CSafeLoader) or {}).get("env")
        if (env.get("id") if isinstance(env, dict) else env) == id:
            found.append(path.stem)
    first = ("ppo", "sac", "dqn", "td3")
    rank = lambda name: first.index(name.split("_")[0]) if name.split("_")[0] in first else len(first)
    return sorted(found, key=lambda name: (rank(name), len(name), name))


def file_name(row: Row) -> str:
    """Returns the file of a picture, below docs/images/gallery."""
    if row.picture.endswith(".svg"):
        return f"../{row.picture}"
    return re.sub(r"[^\w-]", "_", row.id) + ".png"


def page() -> str:
    """Returns the Markdown of the page."""
    lines = ["# Gallery of environments", ""]
    lines += ["For choosing an environment: pictures, spaces, and the shipped configs that train on it. To train:", ""]
    lines += ["```bash", "python -m jrl.train ppo_catch", "```", ""]
    lines += ["`[4]` is an array of four floats. All ids: [environments](environments.md), [suites](suites.md)."]
    lines += ["Your own environment: [tutorial](tutorials/own_environment.md).", ""]
    for heading, (text, section) in TABLE.items():
        lines += [f"## {heading}", "", text, ""]
        lines += ["| | environment | observation | action | configs |", "| --- | --- | --- | --- | --- |"]
        for row in section:
            names = configs(row.id)
            shown = ", ".join(f"`{name}`" for name in names[:_CONFIGS]) or "-"
            more = f" and {len(names) - _CONFIGS} more" if len(names) > _CONFIGS else ""
            size = '{ width="160" }' if row.picture.endswith(".svg") else ""
            picture = f"![{row.id}](images/gallery/{file_name(row)}){size}".replace("gallery/../", "")
            lines.append(f"| {picture} | `{row.id}`: {row.task} | {row.observation} | {row.action} | {shown}{more} |")
        lines.append("")
    return "\n".join(lines)


def draw(row: Row) -> None:
    """Writes the picture of a row. Raises InputError: the environment cannot be drawn."""
    from PIL import Image

    if row.picture.endswith(".svg"):
        return
    found = Image.open(ROOT / "docs" / "images" / row.picture) if row.picture else Image.fromarray(_render(row.id))
    small = found.convert("RGB")
    small.thumbnail(_SIZE)
    PICTURES.mkdir(parents=True, exist_ok=True)
    small.quantize(64).save(PICTURES / file_name(row), optimize=True)
    print(f"wrote {file_name(row)}: {small.width} x {small.height}, {(PICTURES / file_name(row)).stat().st_size} bytes")


def _render(id: str) -> Any:
    """Returns a picture [H, W, 3] u8 of the first state of an environment, of a board game after some moves."""
    import jax
    import numpy as np

    from jrl.envs import make, render
    from jrl.fields.env import EnvConfig

    plain = {"num_envs": 1, "normalize_actions": False, "clip_actions": False}
    made = make(id, **plain)
    section = EnvConfig(id=id, num_envs=1)
    if "MinAtar" in id:  # channels of objects: a colour for each
        colors = np.array([(240, 240, 240), (214, 69, 65), (233, 163, 38), (38, 110, 186)], np.uint8)
        _, obs = made.reset(jax.random.key(0))
        cells = np.asarray(obs)[0]
        found = np.where(cells.any(-1)[..., None], colors[cells.argmax(-1)], np.uint8(30))
        return found.repeat(12, 0).repeat(12, 1)
    several = len(made.spec.agents) > 1
    drawn: Any = render.make_games(section, lambda _: make(id, **plain)) if several else render.make(section, made.spec)
    obs, rng = drawn.reset(), np.random.default_rng(0)
    for _ in range(7 if isinstance(obs, dict) and several else 0):  # moves of a board game, each an allowed one
        mask = np.asarray(obs["action_mask"])
        obs = drawn.step((rng.random(mask.shape) * mask).argmax(-1).astype(np.int32)).obs
    return drawn.render(0) if several else drawn.render()


def main() -> int:
    """Writes the page and pictures; returns the exit status: 0, or 2 for an unknown id."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--write", action="store_true", help="write the page")
    parser.add_argument("--draw", nargs="*", metavar="ID", help="draw pictures; without an id all")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    known = {row.id: row for row in rows()}
    for id in (args.draw or known) if args.draw is not None else ():
        if id not in known:
            print(f"error: {id}: unknown id: choose from {', '.join(known)}", file=sys.stderr)
            return 2
        draw(known[id])
    if args.write or args.draw is not None:
        PAGE.write_text(page(), encoding="utf-8")
        print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
