"""Engines for the trainer's tests: toy ranks that take real updates, behind the four calls that a handoff makes."""

import threading
from concurrent.futures import ThreadPoolExecutor

from toys import Rank, ToyModel

from rl_memory_plugins.errors import RLMemoryError, StateConflictError
from rl_memory_plugins.tags import Content
from rl_memory_plugins.weights.adapters import AdapterLoader

OPTION_S = 60.0  # `update_timeout_s`, for bodies that name no time


class AnySlots:
    """Takes every adapter."""

    def fit(self, config, specs):
        return [], []


class ToyEngine:
    """Tensor-parallel toy ranks in this process. `log` is what was asked of it; `fail[call]` is raised once.

    `open` is what the contract says of admission: everything is resident and the weights are valid.
    """

    def __init__(self, tp=1, first_device=0, log=None):
        self.ranks = [Rank(ToyModel(i, tp), first_device + i) for i in range(tp)]
        self.log = [] if log is None else log
        self.fail = {}
        self.awake = {"weights", "kv_cache"}
        self.paused = False
        self.valid = True
        self.refusing = None
        self.version = None
        self.adapters = {}

    @property
    def open(self):
        return self.valid and not self.paused and self.awake == {"weights", "kv_cache"}

    def sleep(self, level=1, tags=None, mode="abort", **keep):
        self._call("sleep", level, mode, *keep.values())
        if level == 0:
            self.paused = True
            return
        self.awake -= set(tags or ("weights", "kv_cache"))
        self.valid = self.valid and level < 2

    def wake_up(self, tags=None):
        self._call("wake_up", tags)
        self.awake |= set(tags or ("weights", "kv_cache"))
        self.paused = self.paused and self.awake != {"weights", "kv_cache"}

    def devices(self):
        return [rank.manager.device.name for rank in self.ranks]

    def weights_state(self):
        contents = {rank.manager.content.value for rank in self.ranks}
        content = "valid" if contents == {"valid"} else "failed"
        return {"content": content, "weight_version": self.version, "admitting": self.open, "reason": self._reason()}

    def _reason(self):
        if self.open:
            return None
        return "asleep" if self.awake != {"weights", "kv_cache"} else "paused" if self.valid else "failed"

    def post_update(self, body):
        self._call("post_update", body["weight_version"])
        if body.get("base_version") not in (None, self.version):
            raise StateConflictError("the weights have another version")
        if "weights" not in self.awake:
            raise StateConflictError("the weights are asleep")
        former, self.valid = self.valid, False

        def receive(rank):
            report, error = None, None
            try:
                report = rank.receiver.receive(body["endpoints"], body["token"], body["timeout_s"] or OPTION_S)
            except RLMemoryError as caught:
                error = caught
            return report, error

        with ThreadPoolExecutor(len(self.ranks)) as pool:
            answers = list(pool.map(receive, self.ranks))
        errors = [error for _, error in answers if error]
        for rank in self.ranks:
            rank.manager.finish_writing(not errors)
        if errors:
            self.valid = former and all(rank.manager.content is Content.VALID for rank in self.ranks)
            raise errors[0]
        self.valid = True
        self.version = body["weight_version"]
        return {"ranks": [report for report, _ in answers], "thread": threading.current_thread().name}

    def post_adapter(self, body):
        self._call("post_adapter", body["adapter_version"])
        if "weights" not in self.awake:
            raise StateConflictError("the weights are asleep")

        def receive(rank):
            loader = AdapterLoader(AnySlots(), body["config"])
            timeout_s = body["timeout_s"] or OPTION_S
            return rank.receiver.receive(body["endpoints"], body["token"], timeout_s, loader), loader.tensors

        with ThreadPoolExecutor(len(self.ranks)) as pool:
            answers = list(pool.map(receive, self.ranks))
        self.adapters[body["name"]] = (body["adapter_version"], body["config"], [tensors for _, tensors in answers])
        return {"ranks": [report for report, _ in answers]}

    def _call(self, *call):
        self.log.append(call)
        error = self.fail.pop(call[0], None)
        if error is not None:
            raise error
