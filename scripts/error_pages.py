"""The page of error messages, for the site's search: the messages of tests/errors/*.yaml, with links to their pages.

python scripts/error_pages.py    # prints the page
"""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
PATH = "errors.md"
# section of a message's first key -> page under docs/
PAGES = {
    "algo": "algorithms/index.md",
    "callbacks": "callbacks.md",
    "checkpoint": "checkpoints.md",
    "curiosity": "curiosity.md",
    "data": "data.md",
    "devices": "scaling.md",
    "env": "environments.md",
    "env_runners": "scaling.md",
    "evaluation": "evaluation.md",
    "external": "serving.md",
    "multi_agent": "multi-agent.md",
    "network": "networks.md",
    "replay": "replay.md",
    "rollout": "scaling.md",
}
# heading of a table -> page of its messages that name no key
HEADINGS = {
    "clients play": "serving.md",
    "data sets": "data.md",
    "episodes that clients play": "serving.md",
    "hindsight": "replay.md",
    "names of Stable-Baselines3": "from-sb3.md",
    "options of an algorithm": "algorithms/index.md",
    "populations": "evolution.md",
    "python -m jrl.config asks the environments": "environments.md",
    "ranges: test_bounds.py has every key": "algorithms/index.md",
    "runs that cannot be": "config.md",
    "search": "search.md",
    "teachers and mirror images": "robotics.md",
    "what holds a policy to the data": "data.md",
    "what the critic alone reads": "networks.md",
}
_FALLBACK = {"commands": "quickstart.md", "config": "config.md", "migrate": "rllib-users.md"}


def messages(text: str) -> list[tuple[str, list[str]]]:
    """Returns the headings of a table of tests/errors, each with its messages; parts of one message are joined."""
    found: list[tuple[str, list[str]]] = []
    parts = re.split(r"(?m)^# -{10,} (.+)$", text)
    for heading, rows in zip(["", *parts[1::2]], parts[::2], strict=True):
        lines = []
        for row in yaml.load(rows, yaml.CSafeLoader) or []:  # libyaml, as jrl: it takes `[did you mean x?]`
            error = row.get("error", [])
            lines.append(" ... ".join(map(str, error)) if isinstance(error, list) else str(error))
        found += [(heading.strip(), [line for line in dict.fromkeys(lines) if line])]
    return [(heading, lines) for heading, lines in found if lines]


def link(message: str, table: str, heading: str = "") -> str:
    """Returns the page, under docs/, that explains the first key of a message, or else the subject of its heading."""
    key = re.search(rf"\b({'|'.join(PAGES)})(?:\.\w|: )", message)
    return PAGES[key[1]] if key else HEADINGS.get(heading, _FALLBACK[table])


def page() -> str:
    """Returns the Markdown of the page."""
    lines = ["# Error messages", "", "For finding a message that jrl printed: search for its words. Each has the form"]
    lines += [
        "`key: expected X, got Y: do Z`, and the link leads to the page of its key. All errors of a config at once:"
    ]
    lines += ["", "```", "python -m jrl.config validate my.yaml", "```", ""]
    for table, title in (("config", "Configs"), ("commands", "Commands"), ("migrate", "Configs of RLlib")):
        lines += [f"## {title}", ""]
        for heading, found in messages((ROOT / "tests" / "errors" / f"{table}.yaml").read_text(encoding="utf-8")):
            lines += [f"### {heading[0].upper()}{heading[1:]}", ""] if heading else []
            for message in found:
                text = " ".join(message.replace("`", "'").split())
                lines.append(f"* `{text}` ([more]({link(message, table, heading)}))")
            lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(page())
