"""A cluster without Ray: runners in this process, whose calls are made when they are waited for."""

from jrl.rollout.ray_cluster import Failure


class Call:
    """A reference: what an actor was asked, and what goes wrong with it."""

    def __init__(self, fn, args, fault=None):
        self.fn, self.args, self.fault = fn, args, fault

    def result(self):
        if self.fault == "fail":
            raise Failure("it broke")
        return self.fn(*self.args)


class Actor:
    """Its methods have `remote`, as those of Ray's actors."""

    def __init__(self, cluster, host, index, restarts):
        self.cluster, self.host, self.index, self.restarts, self.calls = cluster, host, index, restarts, 0

    def __getattr__(self, name):
        return Method(self, name)


class Method:
    def __init__(self, actor, name):
        self.actor, self.name = actor, name

    def remote(self, *args):
        actor = self.actor
        actor.calls += 1
        fault = actor.cluster.faults.get((actor.index, actor.restarts, actor.calls))
        return Call(getattr(actor.host, self.name), args, fault)


class FakeCluster:
    """Takes the place of `ray_cluster.Cluster`.

    Args:
      faults: (index, restarts, number of the call, 0 for the start) -> "fail", or "hang": it has no answer.
    """

    def __init__(self, faults=None):
        self.faults, self.started, self.killed, self.closed = faults or {}, [], [], []

    def __call__(self, ray, options, host, store):
        self.host = host
        return self

    def start(self, index, make, *args):
        self.started.append((index, args[1]))
        actor = Actor(self, self.host(make, *args), index, args[1])
        return actor, Call(lambda: None, (), self.faults.get((index, args[1], 0)))

    def put(self, value):
        return value

    def wait(self, refs, seconds):
        return next((i for i, ref in enumerate(refs) if ref.fault != "hang"), None)

    def get(self, ref):
        return ref.result()

    def kill(self, actor):
        self.killed.append((actor.index, actor.restarts))

    def close(self, actors, idle):
        self.closed.append([(actor.index, actor.restarts) for actor in actors])
