"""The one error that a user can cause. Imports nothing, so that a command can report bad input before jax loads."""


class InputError(ValueError):
    """Bad input from a user: config, environment, checkpoint or data.

    Each message names the thing and the mend; `errors` holds all that were found. Commands print them and exit with 2.
    """

    def __init__(self, *errors: str):
        super().__init__("\n".join(errors))
        self.errors = errors
