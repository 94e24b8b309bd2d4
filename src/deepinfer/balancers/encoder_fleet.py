"""What vision encoders have to do and what they hold: queues, batches, and embeddings under lease."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from deepinfer.balancers.base import WorkerState
from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError, InvalidRequest, InvariantBroken

__all__ = ["EncoderCost", "EncoderFleet", "ImageTask"]

_INT_MAX = 2**62


@dataclass(frozen=True, slots=True)
class ImageTask:
    """One image of one request.

    Attributes:
        rid: Id of the request.
        media_hash: Hash of what is encoded: the pixels and how they are cut, the model, and the salt of the cache. Equal
            hashes mean equal embeddings.
        patches: Patches of the image, from 1: what encoding costs.
        tokens: Embedding rows that are kept until the request has taken them, from 1.

    Raises:
        InvalidRequest: A number is out of range.
    """

    rid: str
    media_hash: str | bytes
    patches: int
    tokens: int = 1

    def __post_init__(self) -> None:
        """Checks the numbers."""
        checks.check_text("rid", self.rid, InvalidRequest)
        if not isinstance(self.media_hash, str | bytes) or not self.media_hash:
            checks.fail("media_hash", self.media_hash, "non-empty text or bytes", InvalidRequest)
        checks.check_int("patches", self.patches, 1, _INT_MAX, InvalidRequest)
        checks.check_int("tokens", self.tokens, 1, _INT_MAX, InvalidRequest)


@dataclass(frozen=True, slots=True)
class EncoderCost:
    """Seconds of a batch: `batch_s + patch_s * patches`.

    Attributes:
        patch_s: Seconds that a patch adds, above 0.
        batch_s: Seconds of a batch whatever is in it.

    Raises:
        ConfigError: A coefficient is out of range.
    """

    patch_s: float
    batch_s: float = 0.0

    def __post_init__(self) -> None:
        """Checks the coefficients."""
        checks.check_float("patch_s", self.patch_s, 0.0, 1e9, ConfigError, open_low=True)
        checks.check_float("batch_s", self.batch_s, 0.0, 1e9, ConfigError)

    def seconds(self, patches: int, batches: int = 1) -> float:
        """Seconds of some work.

        Args:
            patches: Patches in all.
            batches: Batches that they make.

        Returns:
            Seconds.
        """
        return self.batch_s * batches + self.patch_s * patches


@dataclass(slots=True)
class _Embedding:
    """An image on one worker: waiting, being encoded, or ready."""

    patches: int
    tokens: int
    leases: dict[str, float] = field(default_factory=dict)  # request -> when its lease ends
    is_ready: bool = False


@dataclass(slots=True)
class _Worker:
    state: WorkerState = WorkerState.READY
    queue: deque[str | bytes] = field(default_factory=deque)
    batch: tuple[str | bytes, ...] = ()
    batch_ends_s: float = 0.0
    held: OrderedDict[str | bytes, _Embedding] = field(default_factory=OrderedDict)


class EncoderFleet:
    """The explicit state that `EncoderBalancer` decides from.

    An image that is sent to a worker waits in its queue, is encoded in a batch, and its embedding is kept there until
    every request that leased it has taken it or let its lease end. Embeddings without a lease stay while there is room:
    the next request with the same image finds them.

    Args:
        workers: Names of the workers.
        capacity_tokens: Embedding rows that one worker can keep, images that wait included.
        batch_images: Most images in a batch.
        batch_patches: Most patches in a batch; a larger image makes a batch of its own. None: no limit.
        lease_s: Seconds for which an embedding is kept for a request that does not come for it. `expire` ends such leases.

    Attributes:
        names: Names of the workers.

    Raises:
        ConfigError: A number is out of range, or a name occurs twice.
    """

    def __init__(
        self,
        workers: Iterable[str],
        *,
        capacity_tokens: int = 1 << 20,
        batch_images: int = 8,
        batch_patches: int | None = None,
        lease_s: float = 60.0,
    ) -> None:
        if isinstance(workers, str):
            checks.fail("workers", workers, "several names, not one string", ConfigError)
        self.names = tuple(checks.check_text("workers", name, ConfigError) for name in workers)
        if len(set(self.names)) != len(self.names):
            checks.fail("workers", self.names, "names that differ", ConfigError)
        self.capacity_tokens = checks.check_int(
            "capacity_tokens", capacity_tokens, 1, _INT_MAX, ConfigError
        )
        self.batch_images = checks.check_int("batch_images", batch_images, 1, _INT_MAX, ConfigError)
        self.batch_patches = checks.check_int(
            "batch_patches",
            _INT_MAX if batch_patches is None else batch_patches,
            1,
            _INT_MAX,
            ConfigError,
        )
        self.lease_s = checks.check_float("lease_s", lease_s, 0.0, 1e9, ConfigError, open_low=True)
        self._workers = [_Worker() for _ in self.names]

    def __len__(self) -> int:
        return len(self.names)

    def _at(self, worker: int) -> _Worker:
        if not 0 <= worker < len(self._workers):
            limit = f"an index below {len(self)}, the number of workers"
            checks.fail("worker", worker, limit, ConfigError)
        return self._workers[worker]

    def is_ready(self, worker: int) -> bool:
        """Whether a worker takes images."""
        return self._at(worker).state is WorkerState.READY

    def waiting(self, worker: int) -> tuple[int, int]:
        """Images and patches that wait in a worker's queue."""
        found = self._at(worker)
        return len(found.queue), sum(found.held[key].patches for key in found.queue)

    def busy_s(self, worker: int, now_s: float) -> float:
        """Seconds until the batch of a worker ends, 0 when it runs none."""
        found = self._at(worker)
        return max(0.0, found.batch_ends_s - now_s) if found.batch else 0.0

    def find(self, worker: int, media_hash: str | bytes) -> str | None:
        """How far a worker is with an image.

        Args:
            worker: Its index.
            media_hash: The image.

        Returns:
            `"ready"`, `"running"`, `"waiting"`, or None when it does not have the image.
        """
        found = self._at(worker)
        image = found.held.get(media_hash)
        if image is None:
            return None
        if image.is_ready:
            return "ready"
        return "running" if media_hash in found.batch else "waiting"

    def ahead(self, worker: int, media_hash: str | bytes) -> tuple[int, int]:
        """Images and patches in the queue up to a waiting image, that one included."""
        found = self._at(worker)
        images = patches = 0
        for key in found.queue:
            images += 1
            patches += found.held[key].patches
            if key == media_hash:
                break
        return images, patches

    def free_tokens(self, worker: int) -> int:
        """Rows that a worker could still keep, embeddings without a lease counted as free."""
        held = self._at(worker).held.values()
        kept = sum(i.tokens for i in held if not i.is_ready or i.leases)
        return self.capacity_tokens - kept

    def send(self, worker: int, image: ImageTask, now_s: float) -> None:
        """Counts an image that was routed to a worker, and takes a lease for its request.

        Args:
            worker: Index of the worker.
            image: The image.
            now_s: The time in seconds.

        Raises:
            ConfigError: There is no such worker, or the time is no number.
            InvariantBroken: The worker takes nothing, or has no room.
        """
        checks.check_float("now_s", now_s, -1e15, 1e15, ConfigError)
        found = self._at(worker)
        if found.state is not WorkerState.READY:
            raise InvariantBroken(
                f"{self.names[worker]} is {found.state.name.lower()} and takes no images; ask decide first."
            )
        held = found.held.get(image.media_hash)
        if held is None:
            self._make_room(worker, image.tokens)
            held = _Embedding(image.patches, image.tokens)
            found.held[image.media_hash] = held
            found.queue.append(image.media_hash)
        found.held.move_to_end(image.media_hash)
        held.leases[image.rid] = now_s + self.lease_s

    def begin_batch(self, worker: int, now_s: float, cost: EncoderCost) -> tuple[str | bytes, ...]:
        """Takes the next batch of a worker from its queue, in order of arrival.

        Args:
            worker: Index of the worker.
            now_s: The time in seconds.
            cost: Says how long it will take.

        Returns:
            Hashes of the images, at most `batch_images` and, but for a single image, at most `batch_patches`; empty when
            a batch runs or none waits.
        """
        found = self._at(worker)
        if found.batch or found.state is WorkerState.DEAD:
            return ()
        batch: list[str | bytes] = []
        patches = 0
        while found.queue and len(batch) < self.batch_images:
            if not found.held[found.queue[0]].leases:
                del found.held[found.queue.popleft()]  # nobody wants it any more
                continue
            more = found.held[found.queue[0]].patches
            if batch and patches + more > self.batch_patches:
                break
            batch.append(found.queue.popleft())
            patches += more
        if not batch:
            return ()
        found.batch = tuple(batch)
        found.batch_ends_s = now_s + cost.seconds(patches)
        return found.batch

    def end_batch(
        self, worker: int, batch: tuple[str | bytes, ...] | None = None
    ) -> list[tuple[str, str | bytes]]:
        """Notes that the batch of a worker is encoded.

        Args:
            worker: Index of the worker.
            batch: What `begin_batch` gave, when the news may be of a batch that was lost with an earlier life of the
                worker: news of another batch than the running one change nothing. None: of the running one.

        Returns:
            Requests and hashes whose embeddings can be fetched now.
        """
        found = self._at(worker)
        if batch is not None and batch is not found.batch:
            return []
        ready = []
        for key in found.batch:
            found.held[key].is_ready = True
            ready += [(rid, key) for rid in found.held[key].leases]
        found.batch = ()
        return ready

    def consume(self, worker: int, rid: str, media_hash: str | bytes) -> bool:
        """Gives a lease back: the request has taken the embedding, or was aborted.

        Args:
            worker: Index of the worker.
            rid: The request.
            media_hash: The image.

        Returns:
            Whether there was such a lease.
        """
        image = self._at(worker).held.get(media_hash)
        return image is not None and image.leases.pop(rid, None) is not None

    def drain(self, worker: int) -> None:
        """Lets a worker finish what it has and take nothing new.

        Args:
            worker: Index of the worker.
        """
        if self._at(worker).state is WorkerState.READY:
            self._at(worker).state = WorkerState.DRAINING

    def drop(self, worker: int) -> list[ImageTask]:
        """Notes that a worker died.

        Args:
            worker: Index of the worker.

        Returns:
            The images under lease there, one for each request: all of them must be routed again.
        """
        found = self._at(worker)
        lost = [
            ImageTask(rid, key, image.patches, image.tokens)
            for key, image in found.held.items()
            for rid in image.leases
        ]
        self._workers[worker] = _Worker(state=WorkerState.DEAD)
        return lost

    def revive(self, worker: int) -> None:
        """Lets a worker take images again, empty if it was dead.

        Args:
            worker: Index of the worker.
        """
        self._at(worker).state = WorkerState.READY

    def expire(self, now_s: float) -> list[tuple[str, str | bytes]]:
        """Ends leases whose time is over.

        Args:
            now_s: The time in seconds.

        Returns:
            Requests and hashes of the leases that ended.
        """
        ended = []
        for found in self._workers:
            for key, image in found.held.items():
                late = [rid for rid, until in image.leases.items() if until <= now_s]
                for rid in late:
                    del image.leases[rid]
                ended += [(rid, key) for rid in late]
        return ended

    def num_leases(self, worker: int) -> int:
        """Leases that requests hold on a worker."""
        return sum(len(image.leases) for image in self._at(worker).held.values())

    def held_tokens(self, worker: int) -> int:
        """Rows that a worker keeps, with and without leases."""
        return sum(image.tokens for image in self._at(worker).held.values())

    def _make_room(self, worker: int, tokens: int) -> None:
        held = self._at(worker).held
        total = self.held_tokens(worker)
        for key in list(held):
            if total + tokens <= self.capacity_tokens:
                return
            if held[key].is_ready and not held[key].leases:
                total -= held.pop(key).tokens
        if total + tokens > self.capacity_tokens:
            raise InvariantBroken(
                f"{self.names[worker]} keeps {total} of {self.capacity_tokens} rows under lease and cannot take "
                f"{tokens} more; ask decide first."
            )
