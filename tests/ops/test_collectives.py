"""What devices have together, beside numpy on all of their parts; on one device programs have no collective."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.learn import parallel
from jrl.ops import collectives

X = np.arange(24, dtype=np.float32).reshape(4, 2, 3) - 7  # [D, *]
CASES = {  # of a part -> of all parts
    "psum": (lambda x, axis: collectives.psum({"x": x}, axis)["x"], lambda all: all.sum(0)),
    "pmax": (lambda x, axis: collectives.pmax([x], axis)[0], lambda all: all.max(0)),
    "pmean": (lambda x, axis: collectives.pmean((x, x[0], {}), axis)[0], lambda all: all.mean(0)),
    "of nothing": (
        lambda x, axis: collectives.pmean({"x": x, **collectives.pmean({}, axis)}, axis)["x"],
        lambda all: all.mean(0),
    ),
    "any_device": (lambda x, axis: collectives.any_device(x > 10, axis), lambda all: (all > 10).any(0)),
    "all_devices": (lambda x, axis: collectives.all_devices(x > -5, axis), lambda all: (all > -5).all(0)),
    "all_gather": (collectives.all_gather, lambda all: all.reshape(-1, 3)),
    "along 1": (functools.partial(collectives.all_gather, axis=1), lambda all: np.concatenate(list(all), 1)),
}


@pytest.mark.parametrize("name", CASES)
def test_over_four_devices_one_and_none(four_devices, name):
    own, expected = CASES[name]
    for mesh, parts in ((four_devices, X), (parallel.make_mesh(1), X[:1])):
        body = lambda x: own(x[0], parallel.AXIS)
        program = parallel.pmap(body, mesh, parallel.PER_DEVICE, parallel.REPLICATED)
        np.testing.assert_allclose(np.asarray(jax.block_until_ready(program(parts))), expected(parts), rtol=1e-6)
        text = program.lower(parts).as_text()
        assert (len(parts) > 1) == ("all_reduce" in text or "all_gather" in text)
    np.testing.assert_array_equal(own(jnp.asarray(X[0]), None), expected(X[:1]))
