"""Images of tasks: read in threads, those of the task that is likely next while the present one is computed."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from dave_vit.data import Dataset
from dave_vit.data.batches import Batch, load_batch
from dave_vit.data.geometry import GeometryCache
from dave_vit.evaluate.tasks import EvalTask

_READERS = 4  # threads that decode images
_Key = tuple[int, tuple[int, ...]]


class BatchPrefetcher:
    """Holds the images of one task, and those of the task that is likely next; no more, however many are asked for.

    Args:
        data: the data set.
        size: images of a batch.
    """

    def __init__(self, data: Dataset, size: int) -> None:
        self.data, self.size = data, size
        self._readers = ThreadPoolExecutor(_READERS, "dave-reader")
        self._stacker = ThreadPoolExecutor(1, "dave-stacker")  # one: batches are read in turn, by all readers
        self._held: dict[_Key, list[Future[Batch]]] = {}

    def batches(self, task: EvalTask, geometries: GeometryCache, likely: EvalTask | None = None) -> Iterator[Batch]:
        """The images of a task, each batch as soon as it is read; those that the last task had are still here.

        What goes wrong in a thread is raised here, where the images are asked for.

        Args:
            task: whose images they are.
            geometries: of the model's preprocessing.
            likely: the next one, whose images are read meanwhile; not where its model is another one.
        """
        wanted = {_key(one): one for one in (task, likely) if one and one.model == task.model}
        self._drop([key for key in self._held if key not in wanted])  # before others come
        for key, one in wanted.items():
            if key not in self._held:
                self._held[key] = self._begun(one, geometries)
        for begun in self._held[_key(task)]:
            try:
                batch = begun.result()
            except BaseException:
                self.forget()  # else the same error would come again, whatever has changed
                raise
            yield batch

    def forget(self) -> None:
        """Holds no images any more; who is at a task still gets those of it."""
        self._held.clear()

    def close(self) -> None:
        """Ends the threads, after the images that they are at."""
        for pool in (self._stacker, self._readers):
            pool.shutdown(wait=False, cancel_futures=True)

    def _drop(self, keys: list[_Key]) -> None:
        for key in keys:
            for begun in self._held.pop(key):
                begun.cancel()

    def _begun(self, task: EvalTask, geometries: GeometryCache) -> list[Future[Batch]]:
        numbers = list(dict.fromkeys(task.images))
        parts = [numbers[at : at + self.size] for at in range(0, len(numbers), self.size)]
        return [self._stacker.submit(load_batch, self.data, part, geometries, self._readers) for part in parts]


def _key(task: EvalTask) -> _Key:
    """Tasks with the same one have the same images, prepared alike."""
    return task.model, task.images
