"""Reads the images of tasks in threads, and those of the likely next task while the present one is computed."""

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
    """Keeps the images of one task and of the likely next one; never more.

    Args:
        data: the data set.
        size: images of a batch.
    """

    def __init__(self, data: Dataset, size: int) -> None:
        self.data, self.size = data, size
        self._readers = ThreadPoolExecutor(_READERS, "dave-reader")
        self._stacker = ThreadPoolExecutor(1, "dave-stacker")  # one: batches are read in turn, by all readers
        self._cache: dict[_Key, list[Future[Batch]]] = {}

    def batches(self, task: EvalTask, geometries: GeometryCache, following: EvalTask | None = None) -> Iterator[Batch]:
        """Yield the images of a task, each batch as soon as it is read; those of the last task are still cached.

        An error in a thread is raised here, where its images are needed.

        Args:
            task: the task.
            geometries: geometry of the model's preprocessing.
            following: the likely next task, whose images are read meanwhile if it has the same model.
        """
        tasks = {_cache_key(one): one for one in (task, following) if one and one.model == task.model}
        for key in self._cache.keys() - tasks.keys():  # before others come
            for future in self._cache.pop(key):
                future.cancel()
        for key, one in tasks.items():
            if key not in self._cache:
                self._cache[key] = self._submit(one, geometries)
        for future in self._cache[_cache_key(task)]:
            try:
                batch = future.result()
            except BaseException:
                self.clear()  # else the same error would come again, whatever has changed
                raise
            yield batch

    def clear(self) -> None:
        """Forget all images; an iteration over a task still gets those of it."""
        self._cache.clear()

    def close(self) -> None:
        """Stop the threads after the images that they are reading."""
        for pool in (self._stacker, self._readers):
            pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self, task: EvalTask, geometries: GeometryCache) -> list[Future[Batch]]:
        indices = list(dict.fromkeys(task.images))
        parts = [indices[start : start + self.size] for start in range(0, len(indices), self.size)]
        return [self._stacker.submit(load_batch, self.data, part, geometries, self._readers) for part in parts]


def _cache_key(task: EvalTask) -> _Key:
    """Return what tasks with the same images under the same preprocessing share."""
    return task.model, task.images
