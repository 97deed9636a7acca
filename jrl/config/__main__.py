"""python -m jrl.config list | show | validate | migrate | schema: work with configs without running them."""

import json
import sys
from collections.abc import Sequence

from jrl import config
from jrl.config import multi_agent
from jrl.config.argument import given
from jrl.config.json_schema import json_schema
from jrl.errors import InputError
from jrl.fields import shipped
from jrl.fields.paths import resolve, written
from jrl.host import command


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; return the exit status: 0, or 2 for bad input."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] == "migrate":
        from jrl import migrate

        return migrate.main(argv[1:])
    parser = command.parser(
        "config",
        "List the configs shipped with jrl, show or validate a config, migrate a config of RLlib (see migrate --help), "
        "or print the JSON Schema of all keys, for completion and checks in editors.",
    )
    parser.add_argument("command", choices=("list", "show", "validate", "migrate", "schema"))
    parser.add_argument("config", nargs="?", help="YAML file, or a name from `list`; without: the defaults")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=v", dest="overrides")
    parser.add_argument("--stop", action="append", default=[], metavar="metric=v")
    parser.add_argument("--algo", help="short for --set algo.name=...")
    parser.add_argument("--env", help="short for --set env.id=...")
    parser.add_argument("--drop", action="store_true", help=config.DROP)
    parser.add_argument(
        "--network",
        action="store_true",
        help="with show: show the networks' parameters instead; makes one environment",
    )
    parser.add_argument("--out", metavar="FILE", help="with schema: file for the schema")
    args = parser.parse_args(argv)
    if args.out and args.command != "schema":
        parser.error(f"--out goes with schema, not with {args.command}")
    if args.network and args.command != "show":
        parser.error(f"--network goes with show, not with {args.command}")
    if args.command == "list":
        print(*shipped.lines(), sep="\n")
        return 0
    try:
        if args.command == "schema":
            text = json.dumps(json_schema(), indent=1, allow_nan=False)
            if args.out is None:
                print(text)
                return 0
            with written(resolve(args.out, "--out", "new file"), "--out") as part:
                part.write_text(text + "\n", encoding="utf-8")
            return 0
        flags = {"--algo": args.algo, "--env": args.env}
        print_note = lambda line: print(line, file=sys.stderr)
        data = given(args.config, algo=args.algo, env=args.env, drop=args.drop, tell=print_note)
        sweep = None
        if "sweep" in data:
            from jrl.sweep import settings

            sweep, data, args.overrides = settings.read_settings(data, {}, args.overrides)
        cfg, origins = config.read(data, args.overrides, flags, args.stop)
        if sweep:
            settings.check_spaces(cfg, sweep)
        if args.network:
            from jrl.run import network_table  # imports jax

            print(*network_table.lines(network_table.parameters(cfg)), sep="\n")
            return 0
        if args.command == "show":
            print(config.to_yaml(cfg, origins=origins), end="")
            return 0
        print(*config.Sizes(cfg).lines(), sep="\n")
        from jrl.run import preflight  # imports jax

        try:
            cfg = preflight.check(cfg)
            print(*multi_agent.lines(cfg), sep="\n", end="\n" * (cfg.multi_agent is not None))
        except ImportError as e:
            print(f"the environment was not checked: {e}")
    except InputError as e:
        print(*e.errors, sep="\n", file=sys.stderr)
        return 2
    print("ok")
    return 0


if __name__ == "__main__":
    sys.exit(command.run(main))
