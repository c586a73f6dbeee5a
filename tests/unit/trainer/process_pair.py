"""Two processes in one Gloo process group, which run functions of test modules at the same time."""

import faulthandler
import tempfile
import traceback
from pathlib import Path

import torch.multiprocessing as mp

START_S = 300.0


class ProcessPair:
    """Started once, since importing torch takes longer than most tests."""

    size = 2

    def __enter__(self):
        self._context = mp.get_context("spawn")
        self._start()
        return self

    def __exit__(self, *_):
        self._stop()

    def run(self, function, *arguments, timeout_s=120.0):
        """Both ranks' results of `function(rank, *arguments)`; an error of either is an error here."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(timeout_s):
                self._stop()
                self._start()
                raise AssertionError(f"rank {rank} hangs in {function.__name__}; so far: {answers}")
            try:
                answers.append(pipe.recv())
            except EOFError:
                answers.append((None, "the process died"))
        errors = [f"rank {rank}:\n{error}" for rank, (_, error) in enumerate(answers) if error]
        if errors:
            self._stop()
            self._start()
            raise AssertionError("\n".join(errors))
        return [result for result, _ in answers]

    def _start(self):
        self._folder = tempfile.TemporaryDirectory()  # a port could be taken before it is bound
        store = Path(self._folder.name, "store")
        self._pipes, self._processes = [], []
        for rank in range(self.size):
            pipe, inside = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(inside, rank, self.size, store), daemon=True)
            process.start()
            self._pipes.append(pipe)
            self._processes.append(process)
        for pipe in self._pipes:  # the time of a test is not that of the imports
            assert pipe.poll(START_S) and pipe.recv() == "ready"

    def _stop(self):
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _serve(pipe, rank, size, store):
    import torch
    import torch.distributed as dist

    faulthandler.enable()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store.as_uri(), rank=rank, world_size=size)
    pipe.send("ready")
    while True:
        function, arguments = pipe.recv()
        try:
            pipe.send((function(rank, *arguments), ""))
        except BaseException:
            pipe.send((None, traceback.format_exc()))
