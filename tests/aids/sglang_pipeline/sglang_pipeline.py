"""An SGLang plugin: the count of running requests has those of all batches of a pipeline.

SGLang counts one batch at a time. With two stages a single request is then missing in half of its counts.
"""

from typing import Any


def register() -> None:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler

    publish = Scheduler.publish_load_snapshot

    def publish_load_snapshot(self: Any, force: bool = False) -> Any:
        batches = [batch for batch in (*self.running_mbs, *self.mbs, *self.last_mbs) if batch is not None]
        running = {id(one): one for batch in batches for one in batch.reqs if not one.finished()}
        for waiting in self.waiting_queue:
            running.pop(id(waiting), None)
        present, self.running_batch = self.running_batch, ScheduleBatch(reqs=[*running.values()], batch_is_full=False)
        try:
            return publish(self, force)
        finally:
            self.running_batch = present

    Scheduler.publish_load_snapshot = publish_load_snapshot
