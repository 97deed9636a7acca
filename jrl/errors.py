"""The errors that a command reports without a traceback. Imports nothing: bad input is reported before jax loads."""


class InputError(ValueError):
    """Bad input from a user: config, environment, checkpoint or data.

    Each message names the thing and the mend; `errors` holds all that were found. Commands print them and exit with 2.
    """

    def __init__(self, *errors: str):
        super().__init__("\n".join(errors))
        self.errors = errors


class RunnersLost(RuntimeError):
    """Processes that collect have failed, and none is left or none may be missing. The message names cause and mend."""
