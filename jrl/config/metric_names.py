"""RLlib's names of metrics in stop criteria -> names of jrl."""

_RETURNS = ("episode_reward_mean", "episode_return_mean")
_STEPS = {
    "env_steps", "timesteps_total", "agent_timesteps_total", "num_env_steps_sampled", "num_env_steps_sampled_lifetime",
    "num_agent_steps_sampled", "num_agent_steps_sampled_lifetime", "num_env_steps_trained",
    "num_env_steps_trained_lifetime", "num_agent_steps_trained", "num_agent_steps_trained_lifetime",
}  # fmt: skip
_PARTS = ("env_runners/", "sampler_results/", "info/", "counters/")


def ours(name: str) -> str | None:
    """Return jrl's name of a metric of RLlib's results; None if there is no such name, or if it counts iterations."""
    evaluation = name.startswith("evaluation/")
    rest = name.removeprefix("evaluation/")
    for part in _PARTS:
        rest = rest.removeprefix(part)
    section = "evaluation" if evaluation else "episode"
    if rest in _RETURNS:
        return f"{section}/return"
    if rest == "episode_len_mean":
        return f"{section}/length"
    if rest in ("episode_reward_max", "episode_return_max"):
        return f"{section}/return_max"
    if rest in ("episode_reward_min", "episode_return_min"):
        return f"{section}/return_min"
    if rest in _STEPS and not evaluation:
        return "env_steps"
    if rest == "time_total_s":
        return "time_s"
    if rest.startswith("custom_metrics/"):
        return "evaluation/" * evaluation + "custom/" + rest.removeprefix("custom_metrics/")
    return None
