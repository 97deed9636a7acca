"""RLlib's names of metrics in stop criteria -> names of jrl."""

# name -> name in the sections `episode` and `evaluation`
_EPISODES = {
    "episode_reward_mean": "return", "episode_return_mean": "return", "episode_len_mean": "length",
    "episode_reward_max": "return_max", "episode_return_max": "return_max",
    "episode_reward_min": "return_min", "episode_return_min": "return_min",
}  # fmt: skip
_STEPS = {
    "env_steps", "timesteps_total", "agent_timesteps_total", "num_env_steps_sampled", "num_env_steps_sampled_lifetime",
    "num_agent_steps_sampled", "num_agent_steps_sampled_lifetime", "num_env_steps_trained",
    "num_env_steps_trained_lifetime", "num_agent_steps_trained", "num_agent_steps_trained_lifetime",
}  # fmt: skip
_PARTS = ("env_runners/", "sampler_results/", "info/", "counters/")


def ours(name: str) -> str | None:
    """Returns jrl's name of a metric of RLlib's results; None if there is no such name, or if it counts iterations."""
    rest = name.removeprefix("evaluation/")
    is_evaluation = rest != name
    for part in _PARTS:
        rest = rest.removeprefix(part)
    if rest in _EPISODES:
        return f"{'evaluation' if is_evaluation else 'episode'}/{_EPISODES[rest]}"
    if rest in _STEPS and not is_evaluation:
        return "env_steps"
    if rest == "time_total_s":
        return "time_s"
    if rest.startswith("custom_metrics/"):
        return "evaluation/" * is_evaluation + "custom/" + rest.removeprefix("custom_metrics/")
    return None
